"""`custom_code=True`: the saved folder loads by `trust_remote_code=True` where hf_autonorm is not installed."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

from hf_autonorm import GateConfig, from_pretrained, patch, register_branch, save_pretrained, unpatch
from hf_autonorm.errors import ConfigError, UnsupportedError
from hf_autonorm.hub.custom_code import CODE_FILE, source
from hf_autonorm.hub.flatten import FlattenError, flatten
from hf_autonorm.nn import AutoNorm, PointwiseBranch
from hf_autonorm.nn.branches import BRANCHES
from hf_autonorm.patching.record import wrappers
from tests.hub.local_hub import LocalHub
from tests.hub.small import same_state, tiny_bert, tiny_net
from tests.models import FAMILIES, bert, build, images, perturb_gates, same_bits, tokens

REPOS = ("me/code-by-model", "me/code-by-folder")
SCRIPT = Path(__file__).with_name("without_package.py")
ROOT = SCRIPT.parents[2]


def encoder_decoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    decoder = tf.BertLMHeadModel(bert(is_decoder=True, add_cross_attention=True).config)
    model = tf.EncoderDecoderModel(encoder=tf.BertModel(bert().config), decoder=decoder).eval()
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = 1
    model.generation_config.pad_token_id = model.config.pad_token_id = 0
    return model, {**tokens(), "decoder_input_ids": tokens(seed=1)["input_ids"]}


def timm_wrapper() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2}
    config = tf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes, num_labels=3)
    torch.manual_seed(0)
    return tf.TimmWrapperForImageClassification(config).eval(), images(32)


# name → (family, fields of the patch, auto class, options of from_pretrained)
SEQUENCE, CAUSAL, IMAGE = (
    f"AutoModelFor{kind}" for kind in ("SequenceClassification", "CausalLM", "ImageClassification")
)
CASES = {
    "encoder": ("bert", {"branches": ["dyt", "rms_norm", "adanorm", "derf", "dyisru"]}, SEQUENCE, {}),
    "encoder, base class": ("bert", {}, "AutoModel", {}),
    "encoder, pooling": ("bert", {"gate": GateConfig(granularity="sequence"), "branches": ["film"]}, SEQUENCE, {}),
    "encoder, shards": ("bert", {"norm": "dyt", "strength": 0.3}, SEQUENCE, {}),
    "encoder, no norms": ("bert", {"norm": "identity", "linear": "affine_like"}, SEQUENCE, {}),
    "masked": ("roberta", {"linear": "affine_like"}, "AutoModelForMaskedLM", {}),
    "decoder": ("gpt2", {"linear": "affine_like"}, CAUSAL, {}),
    "decoder, bf16": ("llama", {"linear": "norm_like", "norm": None}, CAUSAL, {"dtype": "bfloat16"}),
    "decoder, auto dtype": ("gemma", {"branches": ["derf"]}, CAUSAL, {"dtype": "auto"}),
    "encoder-decoder": ("t5", {}, "AutoModelForSeq2SeqLM", {}),
    "two models": (encoder_decoder, {}, "AutoModelForSeq2SeqLM", {}),
    "vision": ("vit", {"linear": "norm_like"}, IMAGE, {}),
    "timm inside transformers": (timm_wrapper, {"linear": "affine_like"}, IMAGE, {}),
    "convolutions": ("convnext", {"conv": "norm_like"}, IMAGE, {}),
}


def build_case(case: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    family, fields, _, options = CASES[case]
    model, inputs = build(family) if isinstance(family, str) else family()
    if options:
        model.to(torch.bfloat16)
    return perturb_gates(patch(model, **fields)), inputs


def run_without_package(jobs: list[dict], folder: Path, hub: LocalHub) -> subprocess.CompletedProcess:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = hub.environment(folder / "home")
    environment.pop("PYTHONPATH")
    return subprocess.run(
        [sys.executable, SCRIPT, folder / "jobs.json"], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, hub, client) -> Path:
    """The folder with all models of CASES, saved, and what a process without hf_autonorm made of them; and what it
    made of REPOS."""
    folder = tmp_path_factory.mktemp("models")
    jobs = []
    for number, (case, (_, _, auto, options)) in enumerate(CASES.items()):
        model, inputs = build_case(case)
        shards = {"max_shard_size": "20KB"} if "shards" in case else {}
        saved = save_pretrained(model, folder / str(number), custom_code=True, card=False, **shards)
        torch.save(inputs, folder / f"{number}.inputs")
        job = {"folder": str(saved), "auto": auto, "options": {"trust_remote_code": True, **options}, "again": None}
        job |= {"inputs": str(folder / f"{number}.inputs"), "out": str(folder / f"{number}.out")}
        jobs.append(job)
        if case == "decoder":  # saved again there, by stock transformers
            jobs.append(job | {"again": str(folder / "again"), "out": str(folder / "again.out")})
    hub.faults.clear()
    torch.save({"input_ids": torch.tensor([[2, 5, 9, 3]])}, folder / "hub.inputs")
    for by_folder, repo in enumerate(REPOS):
        client(PUSH, repo=repo, seed=7, by_folder=by_folder, folder=str(folder / "pushed"))
        start = str(folder / f"hub{bool(by_folder)}")
        job = {"folder": repo, "auto": SEQUENCE, "options": {"trust_remote_code": True}, "again": None}
        job |= {"inputs": str(folder / "hub.inputs"), "out": f"{start}.out"}
        jobs += [job, job | {"again": f"{start}.again", "out": f"{start}.again.out"}]
    jobs.append(jobs[0] | {"options": {}, "out": str(folder / "loud.out")})  # not trusted
    done = run_without_package(jobs, folder, hub)
    assert done.returncode == 0, done.stderr[-3000:]
    loud = re.sub(r"\x1b\[\d*m", "", done.stderr).partition(f"loading {jobs[-1]['out']}")[2]
    (folder / "loud.stderr").write_text(loud)
    return folder


@torch.no_grad()
def assert_found(file: Path, model: nn.Module, inputs: dict[str, torch.Tensor], folder: Path) -> None:
    found = torch.load(file)
    assert found["class"][1] == type(model).__name__ and found["class"][0].endswith(".modeling_autonorm")
    assert found["layers"] == sorted({type(m).__name__ for _, m in wrappers(model)})
    state = model.state_dict()
    assert found["state"].keys() == state.keys()
    assert all(same_bits(tensor, state[name]) for name, tensor in found["state"].items())
    inputs = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    for there, here in zip(found["outputs"], (t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor))):
        tolerance = 1e-6 if here.dtype == torch.float32 else 2**-7  # the alignment in memory decides on the last bit
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)
    assert (found["generated"] is not None) == model.can_generate()
    if model.can_generate():
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), found["generated"])


@pytest.mark.parametrize("case", CASES)
def test_the_same_model_without_the_package(loaded, case):
    number, auto = list(CASES).index(case), getattr(tf, CASES[case][2])
    model, inputs = build_case(case)
    if case == "encoder, base class":
        model = model.base_model
    assert_found(loaded / f"{number}.out", model, inputs, loaded)
    normal = auto.from_pretrained(loaded / str(number), **CASES[case][3])  # the package is imported here
    assert type(normal).__module__.startswith("transformers.") and same_state(normal, model)


def test_saved_again_without_the_package(loaded):
    model, inputs = build_case("decoder")
    assert_found(loaded / "again.out", model, inputs, loaded)
    assert (loaded / "again" / CODE_FILE).read_bytes() == (loaded / "0" / CODE_FILE).read_bytes()
    assert same_state(model, tf.AutoModelForCausalLM.from_pretrained(loaded / "again"))


def test_without_trust_and_without_the_package_it_is_loud(loaded):
    """transformers goes on without the patch; it names the unknown method and every tensor that has no place."""
    assert torch.load(loaded / "loud.out")["layers"] == []
    text = (loaded / "loud.stderr").read_text()
    assert "Unknown quantization type, got autonorm" in text
    report = text[text.index("LOAD REPORT") :]
    assert re.search(r"embeddings\.LayerNorm\.original\.weight +\| UNEXPECTED", report)
    assert re.search(r"embeddings\.LayerNorm\.weight +\| MISSING", report)


def test_trust_where_the_package_is_installed(loaded, tmp_path):
    """Its own layers are used, so that its verbs know them; saved again the folder is whole."""
    model, inputs = build_case("decoder")
    number = list(CASES).index("decoder")
    trusted = tf.AutoModelForCausalLM.from_pretrained(loaded / str(number), trust_remote_code=True)
    assert type(trusted).__module__.endswith(".modeling_autonorm") and same_state(trusted, model)
    assert any(isinstance(m, AutoNorm) for m in trusted.modules())
    for save in (save_pretrained, lambda m, folder: m.save_pretrained(folder) or folder):
        folder = Path(save(trusted, tmp_path / "again"))
        assert_self_sufficient(folder)
        assert (folder / CODE_FILE).is_file()
        again = tf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert same_state(again, model) and same_state(from_pretrained(folder), model)
    with pytest.raises(ConfigError, match="not patched"):
        save_pretrained(unpatch(trusted), tmp_path / "stock", custom_code=True)


def assert_self_sufficient(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for path in config.get("auto_map", {}).values():
        assert (folder / f"{path.partition('.')[0]}.py").is_file()


@pytest.mark.parametrize("save", [save_pretrained, lambda m, folder: m.save_pretrained(folder)])
def test_saved_again_without_trust_nothing_points_at_a_missing_file(loaded, tmp_path, save):
    for model in (from_pretrained(loaded / "0"), tf.AutoModel.from_pretrained(loaded / "0")):
        save(model, tmp_path / "again")
        assert_self_sufficient(tmp_path / "again")
        assert not (tmp_path / "again" / CODE_FILE).exists()
        assert same_state(type(model).from_pretrained(tmp_path / "again"), model)


def test_over_a_folder_with_code(tmp_path):
    model = tiny_bert()
    folder = save_pretrained(model, tmp_path / "model", custom_code=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_autonorm.BertModel"
    save_pretrained(model, folder)
    assert not (folder / CODE_FILE).exists() and "auto_map" not in json.loads((folder / "config.json").read_text())


def test_others_entries_of_the_auto_map_stay(tmp_path):
    model = tiny_bert()
    model.config.auto_map = {"AutoTokenizer": ["tokenization_x.Slow", None], "AutoModel": "o/r--modeling_autonorm.X"}
    for custom_code, entries in ((True, 11), (False, 1)):
        folder = save_pretrained(model, tmp_path / "model", custom_code=custom_code)
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert len(auto_map) == entries and auto_map["AutoTokenizer"][0] == "tokenization_x.Slow"


class Cubic(PointwiseBranch):
    def curve(self, z):
        return z**3


@pytest.fixture
def own_branch():
    register_branch("custom_code_test")(Cubic)
    yield
    del BRANCHES["custom_code_test"]


class OwnBert(tf.BertModel):
    pass


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: patch(tiny_net()), UnsupportedError, "Sequential is no transformers model.*installs hf_autonorm"),
        (lambda: patch(FAMILIES["timm_vit"][0]()), UnsupportedError, "TimmWrapper"),
        (lambda: tiny_bert(patched=False), ConfigError, "not patched"),
        (
            lambda: tiny_bert(branches=["custom_code_test"]),
            UnsupportedError,
            "'custom_code_test'.*registers the branch",
        ),
        (lambda: patch(OwnBert(bert().config)), UnsupportedError, "no AutoModel class.*OwnBert"),
    ],
)
def test_what_cannot_have_custom_code_says_so_and_writes_nothing(tmp_path, own_branch, make, error, words):
    with pytest.raises(error, match=words):
        save_pretrained(make(), tmp_path / "model", custom_code=True)
    assert not (tmp_path / "model").exists()


# --- the text --------------------------------------------------------------------------------------------------------


def test_the_text_is_the_packages_own(monkeypatch):
    text = source()
    assert not re.search(r"^\s*(from \.|import \.)", text, re.MULTILINE)  # a relative import would need a second file
    module = types.ModuleType("modeling_autonorm")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, CODE_FILE, "exec"), namespace := vars(module))
    own = {name for name, cls in BRANCHES.items() if cls.__module__ == "hf_autonorm.nn.branches"}
    assert set(namespace["BRANCHES"]) == own
    for name in ("AutoNorm", "PatchNorm", "NormLike"):
        assert namespace[name].__module__ == "modeling_autonorm"  # defined there, not imported
    assert str(ROOT) not in text


def test_one_name_for_two_things_is_refused(tmp_path, monkeypatch):
    (tmp_path / "flatten_a.py").write_text("def f():\n    return 1\n")
    (tmp_path / "flatten_b.py").write_text("def f():\n    return 2\n\ng = f\n")
    (tmp_path / "flatten_c.py").write_text("import json\n\n# why\ndef g(x: int):\n    return json.dumps(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flatten([("flatten_c", "g")]).endswith("# why\ndef g(x: int):\n    return json.dumps(x)\n")
    with pytest.raises(FlattenError, match="'f'.*rename one of them"):
        flatten([("flatten_a", "f"), ("flatten_b", "f")])
    with pytest.raises(FlattenError, match="defines no 'nothing'"):
        flatten([("hf_autonorm.errors", "nothing")])


# --- the Hub ---------------------------------------------------------------------------------------------------------

PUSH = """
from tests.hub.small import *
from hf_autonorm import push_to_hub, save_pretrained
model = tiny_bert(seed)
if by_folder:
    model = save_pretrained(model, folder, custom_code=True)
push_to_hub(model, repo, **({} if by_folder else {"custom_code": True}))
"""
LOAD = """
import torch
from transformers import AutoModelForSequenceClassification as Auto
model = Auto.from_pretrained(repo, cache_dir=cache)
model.save_pretrained(again)
result = model(torch.tensor([[2, 5, 9, 3]])).logits.tolist()
"""


@pytest.mark.parametrize("by_folder", [False, True])
def test_over_the_hub(loaded, hub, client, tmp_path, by_folder):
    """Without the package from an empty cache; and with it, whose process pushed it, from another empty cache."""
    assert CODE_FILE in hub.files(REPOS[by_folder])
    expected = tiny_bert(7)(torch.tensor([[2, 5, 9, 3]])).logits
    assert torch.equal(torch.load(loaded / f"hub{by_folder}.out")["outputs"][0], expected)
    assert_saved(loaded / f"hub{by_folder}.again", code=True)

    found = client(LOAD, repo=REPOS[by_folder], cache=str(tmp_path / "cache"), again=str(tmp_path / "again"))
    assert found == expected.tolist()
    assert_saved(tmp_path / "again", code=False)


def assert_saved(folder: Path, code: bool) -> None:
    assert [path.name for path in folder.glob("*.py")] == [CODE_FILE] * code
    assert ("auto_map" in (folder / "config.json").read_text()) == code
