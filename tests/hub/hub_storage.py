"""What a Hub keeps: repositories of immutable commits on disk, and large files by their SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

LARGE_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gz", ".zip", ".png", ".h5")


class HubError(Exception):
    """What the Hub answers: status, `X-Error-Code`, and the words in the body."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def git_oid(content: bytes) -> str:
    """The name git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def pointer(oid: str, size: int) -> bytes:
    """The small file that git keeps in place of a large one."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


class Repository:
    """Commits are files that never change; refs (`main`, branches, `refs/pr/1`) point at them."""

    def __init__(self, folder: Path, large: Path) -> None:
        self.folder, self.large, self.lock = folder, large, threading.RLock()

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / "repo.json").read_bytes())

    def _save(self, facts: dict[str, Any]) -> None:
        write(self.folder / "repo.json", json.dumps(facts).encode())

    @classmethod
    def create(cls, folder: Path, large: Path, repo_id: str, private: bool) -> Repository:
        repository = cls(folder, large)
        repository._save({"id": repo_id, "private": private, "refs": {}})
        attributes = b"".join(f"*{end} filter=lfs diff=lfs merge=lfs -text\n".encode() for end in LARGE_ENDINGS)
        repository.commit("main", "initial commit", files={".gitattributes": attributes})
        return repository

    def resolve(self, revision: str) -> str:
        """A branch, a PR's ref or a commit → the commit."""
        refs = self.facts["refs"]
        if revision in refs:
            return refs[revision]
        if len(revision) >= 7 and (found := list(self.folder.glob(f"commits/{revision}*.json"))):
            return found[0].stem
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, revision: str) -> dict[str, dict[str, Any]]:
        """path → {"oid", "size", "sha256" (of a large file, else None)}"""
        return self.log(revision)[0]["tree"]

    def log(self, revision: str) -> list[dict[str, Any]]:
        """The commits of a revision, the newest first: oid, parent, title, tree."""
        commits, oid = [], self.resolve(revision)
        while oid is not None:
            commits.append({"oid": oid, **json.loads((self.folder / "commits" / f"{oid}.json").read_bytes())})
            oid = commits[-1]["parent"]
        return commits

    def content(self, entry: dict[str, Any]) -> bytes:
        return (
            self.large / entry["sha256"] if entry["sha256"] else self.folder / "objects" / entry["oid"]
        ).read_bytes()

    def branch(self, name: str, start: str = "main") -> None:
        with self.lock:
            facts = self.facts
            if name in facts["refs"]:
                raise HubError(409, f"Reference already exists: {name}")
            facts["refs"][name] = self.resolve(start)
            self._save(facts)

    def open_pull_request(self, start: str) -> int:
        with self.lock:
            number = 1 + sum(name.startswith("refs/pr/") for name in self.facts["refs"])
            self.branch(f"refs/pr/{number}", start)
            return number

    def commit(
        self,
        branch: str,
        title: str,
        *,
        files: dict[str, bytes] | None = None,
        large: dict[str, tuple[str, int]] | None = None,
        deleted: list[str] | None = None,
        parent: str | None = None,
    ) -> str:
        """Adds a commit to `branch`; all of it or nothing."""
        with self.lock:
            facts = self.facts
            head = facts["refs"].get(branch)
            if facts["refs"] and head is None:
                raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            if parent is not None and not (head or "").startswith(parent):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(self.tree(head)) if head else {}
            for path in deleted or []:
                if path not in tree and not any(name.startswith(f"{path.rstrip('/')}/") for name in tree):
                    raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                inside = path.rstrip("/") + "/"
                tree = {n: e for n, e in tree.items() if n != path and not n.startswith(inside)}
            for path, content in (files or {}).items():
                oid = git_oid(content)
                write(self.folder / "objects" / oid, content)
                tree[path] = {"oid": oid, "size": len(content), "sha256": None}
            for path, (sha256, size) in (large or {}).items():
                if not (self.large / sha256).exists():
                    raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
                tree[path] = {"oid": git_oid(pointer(sha256, size)), "size": size, "sha256": sha256}
            body = json.dumps({"parent": head, "title": title, "tree": tree, "salt": uuid.uuid4().hex}).encode()
            oid = hashlib.sha1(body).hexdigest()
            write(self.folder / "commits" / f"{oid}.json", body)
            facts["refs"][branch] = oid
            self._save(facts)
            return oid


def metadata_errors(readme: str) -> list[str]:
    """What the Hub says against the header of a README.md."""
    import yaml

    if not readme.lstrip().startswith("---"):
        return []
    try:
        data = yaml.safe_load(readme.lstrip().split("---")[1]) or {}
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    if not isinstance(data, dict):
        return ["the metadata must be an object"]
    errors = []
    for key in ("tags", "datasets", "metrics"):
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            errors.append(f'"{key}" must be an array of strings')
    for key in ("library_name", "pipeline_tag"):
        if not isinstance(data.get(key, ""), str):
            errors.append(f'"{key}" must be a string')
    for entry in data.get("model-index", []):
        if not entry.get("name"):
            errors.append('"model-index[0].name" is required')
        for result in entry.get("results", []):
            if not isinstance(result["dataset"].get("config", ""), str):
                errors.append('"model-index[0].results[0].dataset.config" must be a string')
            for metric in result["metrics"]:
                if isinstance(metric["value"], float) and metric["value"] != metric["value"]:
                    errors.append('"model-index[0].results[0].metrics[0].value" must be a number')
    return errors
