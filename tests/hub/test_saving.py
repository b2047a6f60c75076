"""What is saved comes back bit for bit, by every kind of model; other files stay; nothing goes over the network."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForSequenceClassification, BertModel, GPT2Config, GPT2LMHeadModel

from hf_autonorm import from_pretrained, patch, save_pretrained, unpatch
from hf_autonorm.errors import CheckpointError, ConfigError, UnsupportedError
from hf_autonorm.hub.atomic import FolderError
from hf_autonorm.hub.metadata import CardError
from hf_autonorm.nn import AutoNorm
from tests.hub.small import same_state, tiny_bert, tiny_net

INPUTS = {"input_ids": torch.tensor([[2, 5, 9, 3]])}


@pytest.mark.parametrize("door", ["ours", "stock"])
def test_transformers_model(tmp_path, no_network, door):
    model = tiny_bert()
    folder = save_pretrained(model, tmp_path / "model")
    load = from_pretrained if door == "ours" else AutoModelForSequenceClassification.from_pretrained
    again = load(folder)
    assert type(again) is type(model) and same_state(model, again)
    assert torch.equal(model(**INPUTS).logits, again(**INPUTS).logits)


def test_plain_module(tmp_path, no_network):
    model = patch(tiny_net(), norm="dyt", strength=0.5)
    again = from_pretrained(save_pretrained(model, tmp_path / "net"), model=tiny_net(seed=1))
    x = torch.randn(3, 4)
    assert same_state(model, again) and torch.equal(model(x), again(x))


def test_plain_module_keeps_its_dtype(tmp_path):
    model = patch(tiny_net().bfloat16())
    again = from_pretrained(save_pretrained(model, tmp_path / "net"), model=tiny_net(seed=1))
    assert same_state(model, again)


def test_wrapped_root_and_unpatched_module(tmp_path):
    norm = patch(nn.LayerNorm(8))
    again = from_pretrained(save_pretrained(norm, tmp_path / "norm"), model=nn.LayerNorm(8))
    assert isinstance(again, AutoNorm) and same_state(norm, again)
    plain = tiny_net()
    assert same_state(plain, from_pretrained(save_pretrained(plain, tmp_path / "plain"), model=tiny_net(seed=1)))


def test_tied_weights(tmp_path):
    torch.manual_seed(0)
    gpt = patch(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)))
    again = from_pretrained(save_pretrained(gpt, tmp_path / "gpt"))
    assert same_state(gpt, again) and again.lm_head.weight is again.transformer.wte.weight

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.norm(self.embed(ids)))

    tied = patch(Tied())
    again = from_pretrained(save_pretrained(tied, tmp_path / "tied"), model=Tied())
    assert same_state(tied, again) and again.head.weight is again.embed.weight


def test_timm_model(tmp_path):
    timm = pytest.importorskip("timm")
    model = patch(timm.create_model("test_vit", num_classes=3)).eval()
    folder = save_pretrained(model, tmp_path / "vit", metrics={"accuracy": 0.5})
    assert json.loads((folder / "config.json").read_text())["architecture"] == "test_vit"
    again = from_pretrained(folder)
    x = torch.randn(1, 3, 160, 160)
    assert same_state(model, again) and torch.equal(model(x), again(x))


@pytest.mark.parametrize("wrap", ["compile", "compiled part", "data parallel"])
@pytest.mark.parametrize("make", [tiny_bert, lambda: patch(tiny_net())])
def test_wrappers_are_taken_off(tmp_path, make, wrap):
    model, wrapped = make(), None
    if wrap == "compiled part":
        wrapped, name = make(), "bert" if hasattr(model, "bert") else "1"
        setattr(wrapped, name, torch.compile(getattr(wrapped, name)))
    else:
        wrapped = torch.compile(model) if wrap == "compile" else nn.DataParallel(model)
    folder = save_pretrained(wrapped, tmp_path / "model")
    again = from_pretrained(folder, model=None if hasattr(model, "bert") else tiny_net(seed=1))
    assert same_state(model, again)


def test_sharded_and_back_leaves_no_stale_file(tmp_path):
    for make, fresh in ((tiny_bert, lambda: None), (lambda seed=0: patch(tiny_net(seed)), lambda: tiny_net(seed=5))):
        folder = tmp_path / "model"
        model = make()
        save_pretrained(model, folder, max_shard_size="1KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        assert same_state(model, from_pretrained(folder, model=fresh()))
        model = make(seed=1)
        save_pretrained(model, folder)
        assert [p.name for p in folder.glob("model*")] == ["model.safetensors"]
        assert same_state(model, from_pretrained(folder, model=fresh()))


def test_one_kind_of_model_over_another(tmp_path):
    folder = tmp_path / "model"
    save_pretrained(tiny_bert(), folder)
    net = patch(tiny_net())
    save_pretrained(net, folder)
    assert not (folder / "config.json").exists()
    assert same_state(net, from_pretrained(folder, model=tiny_net(seed=1)))
    bert = tiny_bert(seed=3)
    save_pretrained(bert, folder)
    assert not (folder / "autonorm_config.json").exists() and same_state(bert, from_pretrained(folder))


def test_user_files_stay(tmp_path):
    folder = tmp_path / "model"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoint-5" / "model.safetensors").write_bytes(b"a checkpoint's own")
    (folder / "vocab.txt").write_text("words")
    (folder / "link").symlink_to("vocab.txt")
    (folder / "README.md").write_text("My own words.\n")
    for seed in range(2):
        save_pretrained(tiny_bert(seed), folder)
    assert (folder / "checkpoint-5" / "model.safetensors").read_bytes() == b"a checkpoint's own"
    assert (folder / "vocab.txt").read_text() == "words" and os.readlink(folder / "link") == "vocab.txt"
    assert "My own words." in (folder / "README.md").read_text()
    assert os.listdir(tmp_path) == ["model"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_pretrained(tiny_bert(), tmp_path / "link", card=False)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()


def test_files_from_another_folder(tmp_path):
    source = tmp_path / "source"
    (source / "1_Pooling").mkdir(parents=True)
    for name in ("tokenizer.json", "modules.json", "1_Pooling/config.json", "notes.txt", "pytorch_model.bin"):
        (source / name).write_text(name)
    folder = save_pretrained(tiny_bert(), tmp_path / "model", files_from=source)
    assert (folder / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    assert (folder / "tokenizer.json").exists() and (folder / "modules.json").exists()
    assert not (folder / "notes.txt").exists() and not (folder / "pytorch_model.bin").exists()


def test_other_ranks_write_nothing(tmp_path):
    save_pretrained(tiny_bert(), tmp_path / "model", is_main_process=False)
    assert not os.listdir(tmp_path)


def test_a_wrong_card_does_not_cost_the_weights(tmp_path):
    model = tiny_bert()
    with pytest.raises(CardError, match=r"'accuracy'.*must be a number.*saved in"):
        save_pretrained(model, tmp_path / "model", metrics={"accuracy": "good"})
    assert same_state(model, from_pretrained(tmp_path / "model"))


def test_refusals(tmp_path, monkeypatch):
    model, net = tiny_bert(), patch(tiny_net())
    with pytest.raises(ConfigError, match="never touches the network"):
        save_pretrained(model, tmp_path / "m", push_to_hub=True)
    with pytest.raises(ConfigError, match="safetensors"):
        save_pretrained(model, tmp_path / "m", safe_serialization=False)
    with pytest.raises(ConfigError, match="variant"):
        save_pretrained(net, tmp_path / "m", variant="fp16")
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is a file"):
        save_pretrained(model, tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FolderError, match="current directory"):
        save_pretrained(model, ".")
    assert sorted(os.listdir(tmp_path)) == ["file"]
    with pytest.raises(FolderError, match="no folder"):
        from_pretrained(tmp_path / "nowhere")
    save_pretrained(net, "net")
    with pytest.raises(UnsupportedError, match="model=…"):
        from_pretrained("net")
    with pytest.raises(CheckpointError, match="patched already"):
        from_pretrained("net", model=patch(tiny_net()))
    with pytest.raises(CheckpointError, match="names the module '1'"):
        from_pretrained("net", model=nn.Linear(4, 8))
    with pytest.raises(CheckpointError, match="lacks 4.weight"):
        from_pretrained("net", model=nn.Sequential(*tiny_net(), nn.Linear(8, 1)))
    (tmp_path / "net" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no model.safetensors"):
        from_pretrained("net", model=tiny_net())


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"metric": {"accuracy": 1}}, ConfigError, "'metric' is no option.*nearest: 'metrics'"),
        ({"max_shard_sise": "1GB"}, ConfigError, "nearest: 'max_shard_size'"),
        ({"tokenizer": "bert-base-uncased"}, ConfigError, "has no save_pretrained.*files_from"),
        ({"files_from": "no/such/folder/here"}, FolderError, "no folder"),
        ({"model": BertModel}, UnsupportedError, "the class BertModel; make a model of it"),
        ({"model": {"weight": 1}}, UnsupportedError, "nn.Module, got dict"),
        ({"directory": ""}, FolderError, "names no folder"),
        ({"directory": None}, FolderError, "names no folder"),
        ({"directory": "file/below"}, FolderError, "file is a file"),
        ({"directory": "x" * 300}, FolderError, "cannot write beside"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for model in (tiny_bert(), patch(tiny_net())):
        with pytest.raises(error, match=words):
            save_pretrained(**{"model": model, "directory": "new", **arguments})
    assert os.listdir(tmp_path) == ["file"]


def test_a_parent_that_cannot_be_written_to(tmp_path, monkeypatch):
    """A permission, checked by its error: root may write everywhere."""

    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FolderError, match=r"cannot write beside .*model \(Permission denied\).*writable"):
        save_pretrained(tiny_bert(), tmp_path / "model")


def test_metrics_that_are_no_mapping_do_not_cost_the_weights(tmp_path):
    model = tiny_bert()
    for wrong in ("accuracy", ["accuracy"], 0.9):
        with pytest.raises(CardError, match="metrics=.* must be .*saved in"):
            save_pretrained(model, tmp_path / "model", metrics=wrong)
        assert same_state(model, from_pretrained(tmp_path / "model"))
        shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"metrics": {"f1": torch.tensor([0.9, 0.8])}}, r"metrics\['f1'\].*must be a number"),
        ({"metrics": {"f1": np.array([0.9, 0.8])}}, r"metrics\['f1'\].*must be a number"),
        ({"metrics": {"test": {"f1": 0.9}}}, r"metrics\['test'\].*must be a number"),
        ({"metrics": {"steps": 10**400}}, "too large"),
        ({"dataset": 5}, "dataset=5 must be a Hub id"),
        ({"dataset": {"type": "nyu-mll/glue", "config": 5}}, "config=5 must be a word"),
        ({"callbacks": 5}, "not iterable"),
    ],
)
def test_nothing_that_is_wrong_with_the_card_costs_the_weights(facts, words, tmp_path):
    model = tiny_bert()
    with pytest.raises(CardError, match=f"{words}.*is saved in"):
        save_pretrained(model, tmp_path / "model", **facts)
    assert same_state(model, from_pretrained(tmp_path / "model"))


def test_paths_that_hold_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(tiny_bert(norm="dyt"), "my-model")
    save_pretrained(patch(tiny_net(), norm="dyt"), "net")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-5" / "config.json").write_text("{}")
    for path, words in (
        ("", "names no folder"),
        (None, "names no folder"),
        (tiny_bert(), "names no folder"),
        ("my-model/model.safetensors", "is a file; name the folder it is in: my-model"),
        ("my-modle", "no folder my-modle.*nearest: 'my-model'"),
        ("./my-modle", "nearest: 'my-model'"),
        (tmp_path / "my-modle", "nearest: .*my-model"),
        ("empty", "holds no saved model: it is empty"),
        ("run", "checkpoint-5 in it has"),
    ):
        with pytest.raises(FolderError, match=words):
            from_pretrained(path)
    with pytest.raises(CheckpointError, match="holds no model.safetensors"):
        from_pretrained("empty", model=tiny_net())
    with pytest.raises(ConfigError, match=r"the class Linear; make one: model=Linear\(…\)"):
        from_pretrained("net", model=nn.Linear)


def test_a_part_that_was_patched_on_its_own(tmp_path):
    model = tiny_bert(patched=False)
    model.bert = patch(model.bert)
    again = from_pretrained(save_pretrained(model, tmp_path / "model"))
    assert same_state(model, again)


@pytest.mark.parametrize("kind", ["transformers", "plain"])
def test_unpatched_after_patched_leaves_nothing_of_the_patch(tmp_path, kind):
    model = tiny_bert() if kind == "transformers" else patch(tiny_net())
    folder = save_pretrained(model, tmp_path / "model", metrics={"accuracy": 0.5}, baseline={"accuracy": 0.25})
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("tags:\n", "tags:\n- mine\n") + "\nMy words.\n")
    assert (folder / "assets" / "gates.png").exists()
    save_pretrained(unpatch(model), folder)
    if kind == "transformers":
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    card = ModelCard.load(readme)
    assert card.data.to_dict().get("library_name") == ("transformers" if kind == "transformers" else None)
    assert set(card.data.tags) == {"mine", "bert"} if kind == "transformers" else {"mine"}
    assert [result.metric_value for result in card.data.eval_results] == [0.25]  # of the model without the patch
    assert "My words." in card.text and "not patched: a baseline" in card.text and "gates.png" not in card.text
    assert not (folder / "assets" / "gates.png").exists()


def test_the_average_of_weights_is_saved(tmp_path):
    """`AveragedModel` (EMA, SWA) is taken off: its averaged weights are the model."""
    for model, fresh in ((tiny_bert(), None), (patch(tiny_net()), tiny_net(seed=1))):
        averaged = AveragedModel(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        averaged.update_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(2)
        averaged.update_parameters(model)
        again = from_pretrained(save_pretrained(averaged, tmp_path / type(model).__name__), model=fresh)
        assert same_state(averaged.module, again) and not same_state(model, again)


@pytest.fixture
def attempts(monkeypatch):
    """The connections that were tried, on a machine that does not know that its network is dead."""
    tried = []

    def dead(*args, **kwargs):
        tried.append(args[1:])
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", dead)
    monkeypatch.setattr(socket, "getaddrinfo", dead)
    return tried


def test_saving_makes_no_connection(tmp_path, attempts):
    timm = pytest.importorskip("timm")
    facts = {"metrics": {"accuracy": 1}, "base_model": "owner/base", "dataset": "owner/data", "license": "mit"}
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    vit = patch(timm.create_model("test_vit"), "dyt")  # no gate, no picture: one is enough
    for model in (tiny_bert(), tiny_net(), patch(gpt, "dyt"), vit, patch(tiny_net(), "dyt")):
        for _ in range(2):
            folder = save_pretrained(model, tmp_path / "model", repo_id="owner/model", **facts)
            save_pretrained(model, tmp_path / "copy", files_from=folder)
    assert attempts == []
    with pytest.raises(FolderError, match="no folder owner/model, and the Hub gives no model of this name"):
        from_pretrained("owner/model")
    assert attempts  # a connection would have been noticed


def test_tokenizer_is_saved_beside(tmp_path):
    written = []
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: written.append(folder) or (folder / "t.json").touch())
    assert (save_pretrained(tiny_bert(), tmp_path / "model", tokenizer=tokenizer) / "t.json").exists() and written
