"""Pushing: the real client against a Hub on this machine. What arrives, what stays, what happens when things break."""

import json
import time

import pytest
import yaml

from tests.hub.local_hub import FINE_TOKEN, OWNER_TOKEN, READ_TOKEN, RemoteError, own

PREPARE = "from tests.hub.small import *\nfrom hf_autonorm import push_to_hub\nimport warnings\n"
SAVE = PREPARE + "from hf_autonorm import save_pretrained\n"
PUSH = PREPARE + "result = push_to_hub(tiny_bert(seed, norm=norm), repo, **options).oid"


def push(client, repo, seed=0, norm="dyt", **options):
    return client(PUSH, repo=repo, seed=own(repo) + seed, norm=norm, options=options)


def header(hub, repo, revision="main") -> dict:
    return yaml.safe_load(hub.files(repo, revision)["README.md"].decode().split("---")[1])


# --- what arrives ----------------------------------------------------------------------------------------------------


def test_a_model_arrives_in_one_commit_and_loads_in_a_new_process(hub, client, repo, tmp_path):
    facts = {"metrics": {"accuracy": 0.5}, "base_model": "owner/base", "private": True}
    oid = push(client, repo, norm="autonorm", **facts)
    commits = hub.repositories[repo].log("main")
    assert [c["title"] for c in commits] == ["Upload BertForSequenceClassification", "initial commit"]
    assert commits[0]["oid"] == oid and hub.repositories[repo].facts["private"]
    files = hub.files(repo)
    assert {"README.md", "config.json", "model.safetensors", "assets/gates.png"} <= set(files)
    assert json.loads(files["config.json"])["quantization_config"]["quant_method"] == "autonorm"
    assert f'"{repo}"' in files["README.md"].decode() and header(hub, repo)["library_name"] == "hf_autonorm"
    assert hub.sent("PUT", "/lfs/") and not [r for r in hub.sent("PUT", "/lfs/") if r.token]

    script = (
        "import sys, torch, hf_autonorm\nfrom transformers import AutoModelForSequenceClassification as Auto\n"
        "from tests.hub.small import *\nmodel = tiny_bert(int(sys.argv[2]))\nids = torch.tensor([[2, 5, 9, 3]])\n"
        "for again in (Auto.from_pretrained(sys.argv[1]), hf_autonorm.from_pretrained(sys.argv[1])):\n"
        "    assert same_state(model, again) and torch.equal(model(ids).logits, again(ids).logits)\n"
    )
    done = hub.run(script, tmp_path / "empty cache", repo, own(repo))
    assert done.returncode == 0, done.stderr


def test_same_again_is_no_commit_and_a_change_sends_only_what_changed(hub, client, repo):
    first = push(client, repo)
    hub.requests.clear()
    assert push(client, repo) == first and len(hub.repositories[repo].log("main")) == 2
    assert not hub.sent("PUT", "/lfs/")
    assert push(client, repo, seed=1) != first
    assert [r.status for r in hub.sent("PUT", "/lfs/")] == [200]


def test_shards_and_files_of_the_old_model_go(hub, client, repo):
    push(client, repo, max_shard_size="20KB")
    assert sum(name.startswith("model-") for name in hub.files(repo)) > 1
    repository = hub.repositories[repo]
    repository.commit("main", "mine", files={"notes.txt": b"mine", "model-card/model.safetensors": b"mine too"})
    push(client, repo)
    files = hub.files(repo)
    assert [n for n in files if n.startswith("model") and "/" not in n] == ["model.safetensors"]
    assert files["notes.txt"] == b"mine" and files["model-card/model.safetensors"] == b"mine too"
    client(PREPARE + "push_to_hub(patch(tiny_net()), repo)", repo=repo)
    assert "config.json" not in hub.files(repo) and "autonorm_config.json" in hub.files(repo)
    code = PREPARE + "from hf_autonorm import from_pretrained\nnet = from_pretrained(repo, model=tiny_net(1))\n"
    assert client(code + "result = same_state(net, patch(tiny_net()))", repo=repo)


def test_own_words_and_metadata_on_the_hub_stay(hub, client, repo):
    words = "---\nlicense: mit\ntags:\n- mine\n---\n# My title\n\nMy words.\n"
    hub.create(repo).commit("main", "card", files={"README.md": words.encode()})
    push(client, repo, metrics={"accuracy": 0.5})
    push(client, repo, metrics={"accuracy": 0.75})
    text, data = hub.files(repo)["README.md"].decode(), header(hub, repo)
    assert "# My title\n\nMy words.\n" in text and "| accuracy | 0.75 |" in text and "| 0.5 |" not in text
    assert data["license"] == "mit" and data["tags"][0] == "mine" and "autonorm" in data["tags"]


def test_branches_and_pull_requests(hub, client, repo):
    push(client, repo, revision="first")  # in a repository that is not there yet
    assert "config.json" not in hub.files(repo) and "config.json" in hub.files(repo, "first")
    push(client, repo, commit_message="My message")
    push(client, repo, seed=1, revision="dev")
    push(client, repo, seed=2, revision="dev")
    repository = hub.repositories[repo]
    assert len(repository.log("main")) == 2 and len(repository.log("dev")) == 4
    assert repository.log("main")[0]["title"] == "My message"
    code = (
        PREPARE
        + "info = push_to_hub(tiny_bert(3, norm='dyt'), repo, create_pr=True)\nresult = info.pr_url, info.pr_revision"
    )
    url, revision = client(code, repo=repo)
    assert url.endswith("/discussions/1") and revision == "refs/pr/1"
    push(client, repo, seed=4, revision=revision)
    assert len(repository.log("main")) == 2 and len(repository.log("refs/pr/1")) == 4
    weights = [hub.files(repo, r)["model.safetensors"] for r in ("main", "dev", "refs/pr/1", "first")]
    assert len(set(weights)) == 3 and weights[0] == weights[3]


def test_a_reader_opens_a_pull_request(hub, client, repo):
    push(client, repo)
    with pytest.raises(RemoteError, match="write access"):
        push(client, repo, seed=1, token=READ_TOKEN)
    push(client, repo, seed=1, token=READ_TOKEN, create_pr=True)
    assert "refs/pr/1" in hub.repositories[repo].facts["refs"]


def test_a_short_name_goes_into_the_own_namespace(hub, client, repo):
    push(client, repo.removeprefix("me/"))
    assert repo in hub.repositories


def test_visibility_of_an_existing_repository(hub, client, repo):
    hub.create(repo)
    with pytest.raises(RemoteError, match="exists and is public"):
        push(client, repo, private=True)
    assert len(hub.repositories[repo].log("main")) == 1 and not hub.sent("PUT", "")
    hub.create(repo + "-p", private=True)
    push(client, repo + "-p", private=True)
    code = PREPARE + (
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    push_to_hub(tiny_bert(norm='dyt'), repo, private=False)\nresult = [str(w.message) for w in caught]"
    )
    assert any("stays private" in words for words in client(code, repo=repo + "-p"))


def test_a_token_that_may_write_but_not_create(hub, client, repo):
    with pytest.raises(RemoteError, match="write access to the repository"):
        push(client, repo, token=FINE_TOKEN)
    hub.create(repo, private=True)
    push(client, repo, token=FINE_TOKEN)
    assert "config.json" in hub.files(repo)


# --- what breaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429, None])
def test_a_fault_that_passes_is_waited_out(hub, client, repo, status):
    hub.fail("PUT", "/lfs/", status, headers={"Retry-After": "7"} if status == 429 else {})
    push(client, repo)
    assert "config.json" in hub.files(repo) and [r.status for r in hub.sent("PUT", "/lfs/")] == [status, 200]


def test_retry_after_is_obeyed(hub, client, repo):
    hub.fail("PUT", "/lfs/", 429, headers={"Retry-After": "7"})
    code = PREPARE + "push_to_hub(tiny_bert(seed, norm='dyt'), repo)\nresult = list(slept)"
    waits = client(code, repo=repo, seed=own(repo))
    assert len(waits) == 1 and 7 <= waits[0] <= 9


@pytest.mark.parametrize(
    "method, path, status, words",
    [
        ("GET", "^/api/models", 401, "hf auth login"),
        ("POST", "/api/repos/create", 403, "write access"),
        ("POST", "/preupload/", 403, "write access"),
        ("POST", "/commit/", 409, "push again"),
        ("POST", "/commit/", 500, "push again"),
        ("POST", "/commit/", None, "connection broke.*push again"),
        ("POST", "/objects/batch", 429, "rate limit"),
        ("PUT", "/lfs/", 403, "write access"),
        ("PUT", "/lfs/", 500, "push again"),
        ("PUT", "/lfs/", None, "connection broke.*push again"),
    ],
)
def test_a_fault_that_stays_is_a_clear_error_and_the_next_push_goes_on(hub, client, repo, method, path, status, words):
    hub.fail(method, path, status, first=2 if method == "PUT" else 1, times=99)
    with pytest.raises(RemoteError, match=words) as caught:
        push(client, repo, max_shard_size="20KB")
    assert caught.value.kind == "PushError" and repo in str(caught.value)
    assert repo not in hub.repositories or len(hub.repositories[repo].log("main")) == 1
    arrived = {r.path for r in hub.sent("PUT", "/lfs/") if r.status == 200}
    hub.faults.clear()
    hub.requests.clear()
    push(client, repo, max_shard_size="20KB")
    assert "config.json" in hub.files(repo)
    assert arrived.isdisjoint(r.path for r in hub.sent("PUT", "/lfs/"))
    assert arrived or method != "PUT" or status is None


def test_words_that_come_in_between_are_not_lost(hub, client, repo):
    push(client, repo)
    edited = b"---\nlicense: mit\n---\nWords that came in between.\n"
    change = lambda: hub.repositories[repo].commit("main", "edit", files={"README.md": edited})  # noqa: E731
    hub.fail("POST", "/preupload/", action=change)
    with pytest.raises(RemoteError, match="another commit came in between: push again"):
        push(client, repo, seed=1)
    assert hub.files(repo)["README.md"] == edited
    push(client, repo, seed=1)
    assert "Words that came in between." in hub.files(repo)["README.md"].decode()


def test_nobody_there(client, repo):
    code = PREPARE + (
        "from huggingface_hub import constants\nhere, constants.ENDPOINT = constants.ENDPOINT, 'http://127.0.0.1:9'\n"
        "try:\n    push_to_hub(tiny_bert(norm='dyt'), repo)\nfinally:\n    constants.ENDPOINT = here\n"
    )
    with pytest.raises(RemoteError, match="was not pushed: the connection broke.*push again") as caught:
        client(code, repo=repo)
    assert caught.value.kind == "PushError"


@pytest.mark.parametrize(
    "options, kind, words",
    [
        ({"metrics": {"accuracy": "good"}}, "CardError", "must be a number.*Nothing was uploaded"),
        ({"license": ["a", None]}, "CardError", "license.*Nothing was uploaded"),
        ({"metric": {"accuracy": 1}}, "ConfigError", "'metric' is no option.*'metrics'"),
        ({"tokenizer": "bert-base-uncased"}, "ConfigError", "files_from"),
        ({"create_pr": True, "revision": "dev"}, "ConfigError", "refs/pr/N"),
        ({"revision": "0" * 40}, "ConfigError", "is a commit"),
        ({"token": False}, "PushError", "hf auth login"),
        ({"revision": "refs/pr/7"}, "PushError", "has no refs/pr/7"),
    ],
)
def test_wrong_arguments_send_nothing(hub, client, repo, options, kind, words):
    hub.create(repo)
    with pytest.raises(RemoteError, match=words) as caught:
        push(client, repo, **options)
    assert caught.value.kind == kind
    assert not [r for r in hub.requests if r.method in ("POST", "PUT")]


def test_an_unreadable_card_on_the_hub_is_left_alone(hub, client, repo):
    hub.create(repo).commit("main", "card", files={"README.md": b"---\n: [\n---\nWords.\n"})
    with pytest.raises(RemoteError, match="cannot be read.*Nothing was uploaded"):
        push(client, repo)
    assert len(hub.repositories[repo].log("main")) == 2 and not hub.sent("POST", "")


def test_offline_is_one_clear_error_before_anything_is_written(tmp_path, monkeypatch, no_network):
    from hf_autonorm import push_to_hub
    from hf_autonorm.hub.pushing import PushError
    from tests.hub.small import tiny_bert

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(PushError, match="HF_HUB_OFFLINE is set"):
        push_to_hub(tiny_bert(), "me/model", token=OWNER_TOKEN)
    assert not list(tmp_path.iterdir())


# --- the token -------------------------------------------------------------------------------------------------------


def test_a_token_in_a_file_is_not_uploaded(hub, client, repo, tmp_path):
    folder = tmp_path / "saved"
    client(SAVE + "save_pretrained(tiny_bert(norm='dyt'), folder)", folder=str(folder))
    (folder / "training_args.bin").write_bytes(b"\x80..." + OWNER_TOKEN.encode())
    with pytest.raises(RemoteError, match="training_args.bin holds your Hub token; nothing was uploaded"):
        client(PREPARE + "push_to_hub(folder, repo)", folder=str(folder), repo=repo)
    assert not hub.sent("POST", "") and repo not in hub.repositories


def test_the_token_is_nowhere(hub, client, repo):
    push(client, repo, token=OWNER_TOKEN, metrics={"accuracy": 1})
    time.sleep(0.1)
    files = [f for folder in (hub.folder, client.home) for f in folder.rglob("*") if f.is_file()]
    assert len(files) > 10 and client.log in files
    assert [f for f in files if OWNER_TOKEN.encode() in f.read_bytes()] == []


# --- a folder, and the other doors -----------------------------------------------------------------------------------


def test_command_line(hub, client, repo, tmp_path):
    folder = tmp_path / "saved"
    client(SAVE + "save_pretrained(tiny_bert(norm='dyt'), folder, metrics={'accuracy': 0.5})", folder=str(folder))
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "optimizer.pt").write_text("not for the Hub")
    (folder / "notes.txt").write_text("notes")
    code = (
        "import contextlib, io\nimport hf_autonorm_cli as cli\nstdout = io.StringIO()\n"
        "with contextlib.redirect_stdout(stdout), contextlib.suppress(SystemExit):\n    cli.main(arguments)\n"
        "result = stdout.getvalue()"
    )
    facts = json.loads(client(code, arguments=["push", str(folder), repo, "--private", "--message", "Mine", "--json"]))
    commit = hub.repositories[repo].log("main")[0]
    assert facts == {"url": f"{hub.url}/{repo}/commit/{commit['oid']}", "commit": commit["oid"], "pull_request": None}
    assert commit["title"] == "Mine" and hub.repositories[repo].facts["private"]
    files = hub.files(repo)
    assert files["notes.txt"] == b"notes" and not any("checkpoint" in name for name in files)
    assert all(files[f.name] == f.read_bytes() for f in folder.iterdir() if f.is_file())


def test_a_folder_keeps_the_words_on_the_hub_and_brings_its_section(hub, client, repo, tmp_path):
    code = SAVE + (
        "save_pretrained(tiny_bert(norm='dyt'), folder, metrics={'accuracy': value}, license='mit')\n"
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    push_to_hub(folder, repo)\nresult = [str(w.message) for w in caught]"
    )
    folder = tmp_path / "saved"
    client(code, folder=str(folder), repo=repo, value=0.5)
    on_the_hub = hub.files(repo)["README.md"].decode()
    edited = on_the_hub.replace("license: mit", "license: gpl-3.0") + "\nWords on the Hub.\n"
    hub.repositories[repo].commit("main", "edit", files={"README.md": edited.encode()})
    assert not any("own words" in words for words in client(code, folder=str(folder), repo=repo, value=0.75))
    text = hub.files(repo)["README.md"].decode()
    assert "| accuracy | 0.75 |" in text and text.endswith("\nWords on the Hub.\n")
    assert header(hub, repo)["license"] == "gpl-3.0"
    readme = folder / "README.md"
    readme.write_text(readme.read_text() + "\nWords of this folder.\n")
    assert any("keeps its own words" in words for words in client(code, folder=str(folder), repo=repo, value=0.8))
    assert "Words of this folder" not in hub.files(repo)["README.md"].decode()
    assert "Words of this folder" in readme.read_text()


def test_folders_that_cannot_be_pushed(hub, client, repo, tmp_path):
    for folder, words in ((tmp_path / "nowhere", "no folder"), (tmp_path, "holds no saved model")):
        with pytest.raises(RemoteError, match=words):
            client(PREPARE + "push_to_hub(folder, repo)", folder=str(folder), repo=repo)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RemoteError, match="metrics"):
        client(PREPARE + "push_to_hub(folder, repo, metrics={})", folder=str(tmp_path), repo=repo)
    assert not hub.requests


def test_stock_push_of_a_patched_model(hub, client, repo):
    client(PREPARE + "tiny_bert(norm='dyt').push_to_hub(repo, private=True)", repo=repo)
    assert json.loads(hub.files(repo)["config.json"])["quantization_config"]["quant_method"] == "autonorm"
    assert {"autonorm", "hf_autonorm"} <= set(header(hub, repo)["tags"])
    load = "from transformers import AutoModelForSequenceClassification as A\nmodel = tiny_bert(norm='dyt')\n"
    assert client(PREPARE + load + "result = same_state(model, A.from_pretrained(repo))", repo=repo)
    push(client, repo, metrics={"accuracy": 0.5})  # the card is put right by the next push of ours
    assert header(hub, repo)["library_name"] == "hf_autonorm"


def test_trainer_pushes_a_patched_model(hub, client, repo, tmp_path):
    code = PREPARE + (
        "import torch\nfrom transformers import Trainer, TrainingArguments\nmodel = tiny_bert()\n"
        "arguments = TrainingArguments(folder, max_steps=2, per_device_train_batch_size=2, report_to=[],\n"
        "    save_steps=1, use_cpu=True, push_to_hub=True, hub_model_id=repo, hub_strategy='every_save')\n"
        "rows = [{'input_ids': torch.arange(2, 8), 'labels': n % 2} for n in range(8)]\n"
        "trainer = Trainer(model, arguments, train_dataset=rows)\ntrainer.train()\ntrainer.push_to_hub()\n"
        "from transformers import AutoModelForSequenceClassification as A\n"
        "result = same_state(model, A.from_pretrained(repo))\n"
    )
    assert client(code, repo=repo, folder=str(tmp_path / "run"))
    assert {"autonorm", "hf_autonorm"} <= set(header(hub, repo)["tags"])
    assert OWNER_TOKEN.encode() not in b"".join(hub.files(repo).values())
