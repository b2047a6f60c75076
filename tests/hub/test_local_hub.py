"""The Hub that the tests push to does what the real client expects of one."""

import pytest

from tests.hub.local_hub import OWNER_TOKEN, LocalHub, RemoteError

API = "from huggingface_hub import HfApi, hf_hub_download\napi = HfApi()\n"


def fill(hub, repo, **options):
    repository = hub.create(repo, **options)
    repository.commit("main", "two", files={"a.txt": b"a", "sub/deep/b.txt": b"bb"})
    return repository


def test_listing_and_reading(hub, client, repo):
    repository = fill(hub, repo)
    code = API + (
        "files = {f.path: f for f in api.list_repo_tree(repo, recursive=True)}\n"
        "top = [f.path for f in api.list_repo_tree(repo)]\ninfo = api.model_info(repo)\n"
        "paths = [f.path for f in api.get_paths_info(repo, ['a.txt', 'nothing'])]\n"
        "result = sorted(files), sorted(top), files['a.txt'].blob_id, info.sha, info.private, paths\n"
    )
    every, top, blob, sha, private, paths = client(code, repo=repo)
    assert every == [".gitattributes", "a.txt", "sub/deep/b.txt"] and top == [".gitattributes", "a.txt", "sub"]
    assert blob == "2e65efe2a145dda7ee51d1741299f848e5bf752e"  # printf a | git hash-object --stdin
    assert sha == repository.log("main")[0]["oid"] and private is False and paths == ["a.txt"]
    reads = API + "result = open(hf_hub_download(repo, name, revision=revision)).read()"
    assert client(reads, repo=repo, name="sub/deep/b.txt", revision=None) == "bb"
    first = repository.log("main")[1]["oid"]
    assert "filter=lfs" in client(reads, repo=repo, name=".gitattributes", revision=first)
    for name, revision, kind in (
        ("c.txt", None, "RemoteEntryNotFoundError"),
        ("a.txt", first, "RemoteEntryNotFoundError"),
        ("a.txt", "nothing", "RevisionNotFoundError"),
    ):
        with pytest.raises(RemoteError) as caught:
            client(reads, repo=repo, name=name, revision=revision)
        assert caught.value.kind == kind


def test_who_may_see_what(hub, client, repo):
    fill(hub, repo, private=True)
    look = "from huggingface_hub import HfApi\nresult = HfApi(token=token).model_info(repo).id"
    assert client(look, repo=repo, token=OWNER_TOKEN) == repo
    for token, kind in ((False, "RepositoryNotFoundError"), ("hf_wrong", "HfHubHTTPError")):
        with pytest.raises(RemoteError) as caught:
            client(look, repo=repo, token=token)
        assert caught.value.kind == kind


def test_commits_add_delete_and_keep_history(hub, client, repo):
    repository = fill(hub, repo)
    code = API + (
        "from huggingface_hub import CommitOperationAdd as Add, CommitOperationDelete as Delete\n"
        "operations = [Add('new.txt', b'new'), Delete('sub/')]\n"
        "result = api.create_commit(repo, operations, commit_message='third').oid"
    )
    oid = client(code, repo=repo)
    assert set(hub.files(repo)) == {".gitattributes", "a.txt", "new.txt"}
    assert set(hub.files(repo, repository.log("main")[1]["oid"])) == {".gitattributes", "a.txt", "sub/deep/b.txt"}
    assert [c["title"] for c in repository.log(oid)] == ["third", "two", "initial commit"]
    with pytest.raises(RemoteError, match="412|A commit has happened"):
        late = code.replace("commit_message='third'", f"commit_message='late', parent_commit={oid[::-1]!r}")
        client(late.replace("Delete('sub/')", "Delete('new.txt')"), repo=repo)


def test_large_files_in_parts_and_a_download_that_goes_on(tmp_path):
    """Multipart upload, the redirect to the storage, and `Range`, byte for byte."""
    script = (
        "import os, pathlib\nfrom huggingface_hub import HfApi, constants, hf_hub_download\n"
        "content = os.urandom(300_000)\npathlib.Path('w.bin').write_bytes(content)\n"
        "api = HfApi()\napi.create_repo('me/x')\nconstants.DOWNLOAD_CHUNK_SIZE = 1000\n"
        "api.upload_file(path_or_fileobj='w.bin', path_in_repo='w.bin', repo_id='me/x')\n"
        "assert pathlib.Path(hf_hub_download('me/x', 'w.bin')).read_bytes() == content\nprint('equal')"
    )
    with LocalHub(tmp_path / "hub", part_size=100_000) as hub:
        hub.fail("GET", "^/lfs/")
        done = hub.run(script, tmp_path / "home")
        assert done.stdout.strip() == "equal", done.stderr
        assert len(hub.sent("PUT", r"/lfs/.*/0000[123]$")) == 3 and hub.sent("POST", "/lfs-complete/")
        assert [r.status for r in hub.sent("GET", "^/lfs/")] == [200, 206]
        assert not [r for r in hub.sent("PUT", "/lfs/") + hub.sent("GET", "^/lfs/") if r.token]
