"""The addresses of the Hub that a client of models needs: repositories, commits, files, large files."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any
from urllib.parse import parse_qs, unquote

from .hub_http import Handler
from .hub_storage import LARGE_ENDINGS, HubError, Repository, metadata_errors, pointer, write

REGULAR_MOST = 5 * 2**20  # bytes; larger files go through LFS whatever they are called


class Api(Handler):
    def respond(self) -> None:
        words = [unquote(word) for word in self.url.path.strip("/").split("/")]
        match words:
            case ["api", "whoami-v2"]:
                self.answer({"type": "user", "name": self.user()[0], "orgs": [], "auth": {}})
            case ["api", "validate-yaml"]:
                errors = metadata_errors(self.sent()["content"])
                self.answer({"errors": [{"message": e} for e in errors], "warnings": []}, 400 if errors else 200)
            case ["api", "repos", "create"]:
                self.create_repository()
            case ["api", "models", owner, name, *rest]:
                self.model(f"{owner}/{name}", rest)
            case [owner, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self.large_files(f"{owner}/{name.removesuffix('.git')}")
            case ["lfs-complete", oid]:
                self.complete_large(oid)
            case [owner, name, "resolve", revision, *path]:
                self.file(f"{owner}/{name}", revision, "/".join(path))
            case _:
                raise HubError(404, f"no such address: {self.url.path}")

    # --- who, and what they may do -----------------------------------------------------------------------------------

    def sent(self) -> dict[str, Any]:
        if "json" in self.headers.get("Content-Type", ""):
            return json.loads(self.body or b"{}")
        return parse_qs(self.body.decode())

    def user(self) -> tuple[str, bool, bool]:
        if self.seen.token not in self.hub.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.users[self.seen.token]

    def repository(self, repo_id: str, write: bool = False, pull_request: bool = False) -> Repository:
        name, _, may_write = self.user() if self.seen.token else ("", False, False)
        found = self.hub.repositories.get(repo_id)
        owns = name == repo_id.split("/")[0]
        if found is None or (found.facts["private"] and not owns):
            raise HubError(404 if name else 401, "Repository not found", "RepoNotFound")
        if write and not (owns and may_write) and not (pull_request and name):
            raise HubError(403, "You don't have the rights to write to this repo", None)
        return found

    def create_repository(self) -> None:
        name, may_create, _ = self.user()
        wish = self.sent()
        owner = wish.get("organization") or name
        if not may_create or owner != name:
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id = f"{owner}/{wish['name']}"
        if repo_id in self.hub.repositories:
            url = {"url": f"{self.hub.url}/{repo_id}"}
            return self.answer({"error": "You already created this model repo", **url}, 409)
        self.hub.create(repo_id, wish.get("visibility") == "private" or bool(wish.get("private")))
        self.answer({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    # --- one repository ----------------------------------------------------------------------------------------------

    def model(self, repo_id: str, rest: list[str]) -> None:
        opens_pr = self.query.get("create_pr") == ["1"]
        match self.command, rest:
            case "GET", []:
                self.answer(self.information(repo_id, "main"))
            case "GET", ["revision", revision]:
                self.answer(self.information(repo_id, revision))
            case "GET", ["tree", revision, *path]:
                self.answer(self.listing(repo_id, revision, "/".join(path)))
            case "POST", ["paths-info", revision]:
                wanted = self.sent()["paths"]
                self.answer([e for e in self.listing(repo_id, revision, "") if e["path"] in wanted])
            case "GET", ["refs"]:
                refs = self.repository(repo_id).facts["refs"].items()
                pulls = [{"name": n, "ref": n, "targetCommit": o} for n, o in refs if "/pr/" in n]
                branches = [
                    {"name": n, "ref": f"refs/heads/{n}", "targetCommit": o} for n, o in refs if "/pr/" not in n
                ]
                self.answer({"branches": branches, "pullRequests": pulls, "converts": [], "tags": []})
            case "POST", ["branch", name]:
                self.repository(repo_id, write=True).branch(name, self.sent().get("startingPoint", "main"))
                self.answer({})
            case "POST", ["preupload", revision]:
                self.preupload(self.repository(repo_id, write=True, pull_request=opens_pr), revision)
            case "POST", ["commit", revision]:
                self.commit(self.repository(repo_id, write=True, pull_request=opens_pr), repo_id, revision, opens_pr)
            case _, ["discussions", *_]:
                self.answer({"discussions": [], "count": 0, "start": 0})
            case _:
                raise HubError(404, f"no such address: {self.url.path}")

    def information(self, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self.repository(repo_id)
        sha, tree = repository.resolve(revision), repository.tree(revision)
        return {
            "id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0], "sha": sha, "gated": False,
            "private": repository.facts["private"], "disabled": False, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": path} for path in sorted(tree)],
        }  # fmt: skip

    def listing(self, repo_id: str, revision: str, below: str) -> list[dict[str, Any]]:
        entries, folders = [], {}
        for path, entry in sorted(self.repository(repo_id).tree(revision).items()):
            if below and not path.startswith(below + "/"):
                continue
            rest = path.removeprefix(below + "/" if below else "").split("/")
            if len(rest) > 1 and self.query.get("recursive", ["false"])[0].lower() != "true":
                folders[path.removesuffix("/".join(rest)) + rest[0]] = None
                continue
            line = {"type": "file", "path": path, "size": entry["size"], "oid": entry["oid"]}
            if entry["sha256"]:
                line["lfs"] = {
                    "oid": entry["sha256"],
                    "size": entry["size"],
                    "pointerSize": len(pointer(entry["sha256"], entry["size"])),
                }
            entries.append(line)
        if below and not entries and not folders:
            raise HubError(404, f"{below} does not exist on {revision!r}", "EntryNotFound")
        for folder in folders:
            oid = hashlib.sha1(folder.encode()).hexdigest()
            entries.append({"type": "directory", "path": folder, "size": 0, "oid": oid})
        return entries

    def file(self, repo_id: str, revision: str, path: str) -> None:
        repository = self.repository(repo_id)
        commit = repository.resolve(revision)
        head = {"X-Repo-Commit": commit}
        entry = repository.tree(commit).get(path)
        if entry is None:
            return self.answer({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"} | head)
        if entry["sha256"] is None:
            return self.answer_file(repository.content(entry), ETag=f'"{entry["oid"]}"', **head)
        linked = {"X-Linked-Etag": f'"{entry["sha256"]}"', "X-Linked-Size": str(entry["size"])}
        self.answer(b"", 302, **head | linked | {"Location": f"{self.hub.storage_url}/lfs/{entry['sha256']}"})

    # --- uploading ---------------------------------------------------------------------------------------------------

    def preupload(self, repository: Repository, revision: str) -> None:
        tree, answers = repository.tree(revision), []
        for file in self.sent()["files"]:
            base64.b64decode(file["sample"])
            is_large = file["path"].endswith(LARGE_ENDINGS) or file["size"] > REGULAR_MOST
            there = tree.get(file["path"])
            line = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            answers.append(line | ({"oid": there["sha256"] or there["oid"]} if there else {}))
        self.answer({"files": answers, "commitOid": repository.resolve(revision)})

    def large_files(self, repo_id: str) -> None:
        self.repository(repo_id, write=True, pull_request=True)
        answers = []
        for wish in self.sent()["objects"]:
            answer, oid, size = dict(wish), wish["oid"], self.hub.part_size
            address = f"{self.hub.storage_url}/lfs/{oid}"
            if not (self.hub.folder / "lfs" / oid).exists():
                upload = {"href": address}
                if size is not None and wish["size"] > size:
                    parts = range(1, -(-wish["size"] // size) + 1)
                    addresses = {f"{n:05d}": f"{address}/{n:05d}" for n in parts}
                    upload = {
                        "href": f"{self.hub.url}/lfs-complete/{oid}",
                        "header": {"chunk_size": str(size), **addresses},
                    }
                answer["actions"] = {"upload": upload}
            answers.append(answer)
        self.answer({"transfer": "basic", "objects": answers})

    def complete_large(self, oid: str) -> None:
        numbers = [f"{part['partNumber']:05d}" for part in self.sent()["parts"]]
        content = b"".join((self.hub.folder / "parts" / oid / number).read_bytes() for number in numbers)
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, "the parts do not give this hash")
        write(self.hub.folder / "lfs" / oid, content)
        self.answer({})

    def commit(self, repository: Repository, repo_id: str, revision: str, opens_pr: bool) -> None:
        header, files, large, deleted = {}, {}, {}, []
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    header = value
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    large[value["path"]] = (value["oid"], value["size"])
                case "deletedFile" | "deletedFolder":
                    deleted.append(value["path"])
        errors = metadata_errors(files["README.md"].decode()) if "README.md" in files else []
        if errors:
            raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors))
        branch, number = revision, None
        if opens_pr:
            number = repository.open_pull_request(header.get("parentCommit") or revision)
            branch = f"refs/pr/{number}"
        oid = repository.commit(
            branch, header["summary"], files=files, large=large, deleted=deleted, parent=header.get("parentCommit")
        )
        url = f"{self.hub.url}/{repo_id}"
        pr = f"{url}/discussions/{number}" if number else None
        links = {"commitUrl": f"{url}/commit/{oid}", "pullRequestUrl": pr}
        self.answer({"success": True, "commitOid": oid, "hookOutput": "", **links})
