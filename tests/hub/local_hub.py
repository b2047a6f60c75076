"""A Hub on this machine, for tests: the REST protocol that `huggingface_hub` speaks, over HTTP on 127.0.0.1.

    with LocalHub(folder) as hub:
        done = hub.run("import hf_autonorm, …", cache)           # a fresh process of the real client
        hub.fail("PUT", "/lfs/", status=500)                     # the next upload of a large file fails
        assert hub.files("me/model")["config.json"]

Large files go through git-LFS (basic, or multipart where `part_size` is given) to a second server of another name,
as to a storage provider; it refuses any request that carries a token. Xet is a binary protocol of its own and switched
off in `environment`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import zlib
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from .hub_api import Api
from .hub_http import Fault, Request, Storage
from .hub_storage import HubError, Repository

ROOT = Path(__file__).resolve().parents[2]
OWNER_TOKEN, READ_TOKEN, FINE_TOKEN = "hf_theOwnersSecretWord", "hf_aReadersSecretWord", "hf_aFineGrainedSecretWord"


def own(name: str) -> int:
    """A number for each name: a seed of its own, as the Hub has the weights of an equal model already."""
    return zlib.crc32(name.encode()) % 10**6


class LocalHub:
    """The Hub; `users` maps a token to (name, may create repositories, may write)."""

    def __init__(self, folder: Path, part_size: int | None = None) -> None:
        self.folder, self.part_size = Path(folder), part_size
        self.users = {
            OWNER_TOKEN: ("me", True, True),
            READ_TOKEN: ("guest", False, False),
            FINE_TOKEN: ("me", False, True),
        }
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    def __enter__(self) -> LocalHub:
        (self.folder / "lfs").mkdir(parents=True, exist_ok=True)
        handlers = [type(kind.__name__, (kind,), {"hub": self}) for kind in (Api, Storage)]
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
        # two names: to some clients a host is the same whatever its port
        names = zip(("127.0.0.1", "localhost"), self.servers)
        self.url, self.storage_url = (f"http://{name}:{server.server_address[1]}" for name, server in names)
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def fail(self, method: str, path: str, status: int | None = None, **options: Any) -> None:
        """`first`, `times`, `message`, `headers`, `action`: see `Fault`."""
        usual = {"first": 1, "times": 1, "message": "made to fail", "headers": {}}
        self.faults.append(Fault(method, path, status, **usual | options))

    def create(self, repo_id: str, private: bool = False) -> Repository:
        with self.lock:
            if repo_id in self.repositories:
                raise HubError(409, "You already created this model repo")
            folder = self.folder / "repos" / repo_id.replace("/", "--")
            self.repositories[repo_id] = Repository.create(folder, self.folder / "lfs", repo_id, private)
            return self.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo_id]
        return {path: repository.content(entry) for path, entry in repository.tree(revision).items()}

    def sent(self, method: str, path: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and re.search(path, r.path)]

    def environment(self, home: Path, token: str | None = OWNER_TOKEN) -> dict[str, str]:
        """For a process that takes this for the Hub; its cache and stored token lie in `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        ours = {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        return kept | ours | ({"HF_TOKEN": token} if token else {})

    def take_over(self, monkeypatch: Any, cache: Path) -> None:
        """To the client in this process it is the Hub, until the test ends; `me` is logged in."""
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", OWNER_TOKEN)

    def run(self, script: str, home: Path, *arguments: Any, token: str | None = OWNER_TOKEN, **extra: str):
        """A fresh Python process with the real client: `subprocess.CompletedProcess`, its output as text."""
        command = [sys.executable, "-c", script, *map(str, arguments)]
        environment = self.environment(home, token) | extra
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=self.folder)


_LOOP = """
import contextlib, io, json, sys, traceback, types
import huggingface_hub.utils._http as http
import hf_autonorm
slept, channel = [], sys.stdout
http.time = types.SimpleNamespace(sleep=slept.append, time=http.time.time)  # waits are noted, not waited
sys.stdout = sys.stderr
for line in sys.stdin:
    code, values = json.loads(line)
    space, answer = {"slept": slept, **values}, {}
    slept.clear()
    try:
        exec(compile(code, "<test>", "exec"), space)
        answer["result"] = space.get("result")
    except BaseException as error:
        traceback.print_exc()
        answer["error"] = [type(error).__name__, str(error)]
    channel.write(json.dumps(answer) + "\\n")
    channel.flush()
"""


class RemoteError(Exception):
    """What was raised in the client's process; `kind` is its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """One process with the real client, for many short pieces of code; its stderr (and stdout) are kept in `log`."""

    def __init__(self, hub: LocalHub, home: Path) -> None:
        self.home, self.log = home, home / "log.txt"
        home.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            env=hub.environment(home),
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )

    def __call__(self, code: str, **values: Any) -> Any:
        """Runs `code` with these values as its variables; gives back its `result` (JSON)."""
        self.process.stdin.write(json.dumps([code, values]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RemoteError(*answer["error"])
        return answer["result"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=120)
