"""Stock `from_pretrained` rebuilds a patched model, or says clearly why it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

from hf_autonorm import GateConfig, calibrate, patch, plan, set_strength, unpatch
from hf_autonorm.errors import AutoNormError, CheckpointError, ConfigError
from hf_autonorm.nn import AutoNorm
from hf_autonorm.patching.record import read_record
from tests.models import FAMILIES, K, bert, build, perturb_gates, perturb_norms, run, same_bits, tokens

FAMILY_CLASSES = {
    "bert": tf.AutoModelForSequenceClassification,
    "roberta": tf.AutoModelForMaskedLM,
    "gpt2": tf.AutoModelForCausalLM,
    "distilbert": tf.AutoModelForTokenClassification,
    "llama": tf.AutoModelForCausalLM,
    "gemma": tf.AutoModelForCausalLM,
    "t5": tf.AutoModelForSeq2SeqLM,
    "vit": tf.AutoModelForImageClassification,
    "swin": tf.AutoModelForImageClassification,
    "deit": tf.DeiTForImageClassificationWithTeacher,
    "convnext": tf.AutoModelForImageClassification,
}


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, AutoNorm)}


def trained(family="bert", **fields):
    """A patched model as training might leave it."""
    model, inputs = build(family)
    patch(model, **{"strength": 0.75, "branches": ["dyt", "rms_norm"], **fields})
    perturb_gates(model)
    for i, layer in enumerate(layers(model).values()):
        layer.set_scalar("frozen", i % 2)
        layer.r2.fill_(0.1 * i)
        layer.bias_branches[0].set_slope(0.01) if hasattr(layer.bias_branches[0], "set_slope") else None
    return model, inputs


def assert_equal(loaded, model):
    theirs = model.state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    for name, value in loaded.state_dict().items():
        assert same_bits(value, theirs[name]), name
    assert {n: (m.scalar("strength"), m.scalar("frozen")) for n, m in layers(loaded).items()} == {
        n: (m.scalar("strength"), m.scalar("frozen")) for n, m in layers(model).items()
    }
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    assert read_record(loaded.config) == read_record(model.config)


@torch.no_grad()
def assert_same_function(loaded, model, inputs, tolerance=1e-6):
    for a, b in zip(run(loaded.eval(), inputs), run(model.eval(), inputs)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- the door --------------------------------------------------------------------------------------------------------


HALF = ("bert", "gpt2", "llama", "t5", "swin")


@pytest.mark.parametrize(
    "family, dtype",
    [(f, torch.float32) for f in sorted(FAMILY_CLASSES)] + [(f, torch.bfloat16) for f in HALF],
)
def test_stock_from_pretrained_gives_the_state_back(tmp_path, family, dtype):
    build(family)[0].save_pretrained(tmp_path / "plain")
    plain = FAMILY_CLASSES[family].from_pretrained(
        tmp_path / "plain", dtype=dtype
    )  # `.bfloat16()` rounds more than it
    model = perturb_gates(patch(plain, branches=["dyt", "derf", "rms_norm"], strength=0.3, seed=4))
    for layer in layers(model).values():
        layer.freeze()
    model.save_pretrained(tmp_path / "patched")
    loaded = FAMILY_CLASSES[family].from_pretrained(tmp_path / "patched", dtype=dtype)
    assert type(loaded) is type(model) and not loaded.training
    assert_equal(loaded, model)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in FAMILIES[family][1]().items()}
    assert_same_function(loaded, model, inputs)
    assert all(p.requires_grad for p in loaded.parameters())
    if dtype != torch.float32:
        assert_equal(FAMILY_CLASSES[family].from_pretrained(tmp_path / "patched", dtype="auto"), model)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "dyt"},
        {"gate": GateConfig(kind="fixed", value=0.4)},
        {"gate": GateConfig(kind="random")},
        {"gate": GateConfig(granularity="layer")},
        {"gate": GateConfig(granularity="sequence"), "branches": ["film"]},
        {"gate": GateConfig(hidden=0.25, tau=0.7)},
        {"include": ["output.LayerNorm"]},
        {"include": r"bert\.emb.*", "strength": 0.0},
        {"branches": ["adanorm", "derf", "dyisru"], "gate": GateConfig(kind="hard")},
    ],
    ids=str,
)
def test_every_setting_reloads(tmp_path, fields):
    model, inputs = trained(**fields)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert_same_function(loaded, model, inputs)
    for name, layer in layers(model).items():
        assert layers(loaded)[name].gate == layer.gate and layers(loaded)[name].branch_names == layer.branch_names
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert_equal(tf.AutoModelForSequenceClassification.from_pretrained(again), model)
    rows = {row.name: row for row in plan(loaded)}
    assert all(rows[name].reason == "already patched" for name in layers(model))


def test_settings_that_differ_from_module_to_module(tmp_path):
    model, inputs = build("bert")
    patch(model, include=r".*layer\.0\..*", strength=0.25)
    patch(model, include=r".*layer\.1\..*", norm="dyt")
    patch(model, gate=GateConfig(kind="softmax"), branches=["derf"])
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert_same_function(loaded, model, inputs)
    assert len(read_record(loaded.config)["patches"]) == 3


def test_sharded_files(tmp_path):
    model, inputs = trained()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert_same_function(loaded, model, inputs)


@pytest.mark.parametrize("family", ["gpt2", "t5", "gemma"])
def test_tied_embeddings(tmp_path, family):
    model, inputs = trained(family)
    model.save_pretrained(tmp_path)
    loaded = FAMILY_CLASSES[family].from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert_same_function(loaded, model, inputs)


def test_a_calibrated_model(tmp_path):
    model, inputs = build("bert")
    calibrate(patch(model, norm="dyt"), [inputs])
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert_same_function(loaded, model, inputs)


def test_a_part_that_was_patched_alone(tmp_path):
    model, inputs = build("bert")
    patch(model.bert.encoder)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert len(layers(loaded)) == 4


@pytest.mark.parametrize("patched", ["encoder", "decoder", "both"])
def test_a_model_assembled_from_patched_parts(tmp_path, patched):
    """Stock `save_pretrained` of the whole: its config is written before anyone can know of the parts."""
    encoder = tf.BertModel(bert().config)
    decoder = tf.BertLMHeadModel(bert(is_decoder=True, add_cross_attention=True).config)
    if patched in ("encoder", "both"):
        patch(encoder)
    if patched in ("decoder", "both"):
        patch(decoder, "dyt", strength=0.5)
    model = tf.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.save_pretrained(tmp_path)
    loaded = tf.EncoderDecoderModel.from_pretrained(tmp_path)
    assert_equal(loaded, model)
    assert len(layers(loaded)) == {"encoder": 5, "decoder": 8, "both": 13}[patched]


@pytest.mark.parametrize("alive", [True, False])
def test_a_part_grafted_from_a_patched_model(tmp_path, alive):
    donor, model = patch(tf.BertModel(bert().config)), tf.BertModel(bert().config)
    model.encoder = donor.encoder
    if not alive:
        del donor
    torch.nn.parallel.DataParallel(model).state_dict()  # another name for everything: no harm
    model.save_pretrained(tmp_path)
    assert_equal(tf.BertModel.from_pretrained(tmp_path), model)
    if alive:
        assert len(read_record(donor.config)["patches"][0]["modules"]) == 5
    assert len(read_record(model.config)["patches"][0]["modules"]) == 4


def test_an_unrelated_class_is_refused(tmp_path):
    trained()[0].save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="patched BertForSequenceClassification, and GPT2LMHeadModel has none"):
        tf.GPT2LMHeadModel.from_pretrained(tmp_path)


# --- base and headed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, base, head",
    [
        ("bert", tf.BertModel, tf.BertForTokenClassification),
        ("gpt2", tf.GPT2Model, tf.GPT2LMHeadModel),
        ("roberta", tf.RobertaModel, tf.RobertaForSequenceClassification),
        ("vit", tf.ViTModel, tf.ViTForImageClassification),
        ("llama", tf.LlamaModel, tf.LlamaForSequenceClassification),
    ],
)
def test_base_and_headed_classes_load_each_others_checkpoints(tmp_path, family, base, head):
    model, inputs = trained(family)
    model.save_pretrained(tmp_path / "headed")
    as_base = base.from_pretrained(tmp_path / "headed")
    body = getattr(model, model.base_model_prefix)
    body_state = {k: v for k, v in body.state_dict().items()}
    for name, value in as_base.state_dict().items():
        if name in body_state:
            assert same_bits(value, body_state[name]), name
    assert set(layers(as_base)) == set(layers(body))
    as_base.save_pretrained(tmp_path / "base")
    as_head = head.from_pretrained(tmp_path / "base")
    prefix = as_head.base_model_prefix + "."
    assert {name.removeprefix(prefix) for name in layers(as_head)} == set(layers(as_base))
    for name, layer in layers(as_head).items():
        for key, value in layers(as_base)[name.removeprefix(prefix)].state_dict().items():
            assert same_bits(layer.state_dict()[key], value)
    run(as_head, {k: v[:1] for k, v in inputs.items()})
    (entry,) = read_record(as_head.config)["patches"]
    assert sorted(entry["modules"]) == sorted(layers(as_head))


def test_a_head_with_a_norm_of_its_own_is_passed_over_by_other_heads(tmp_path):
    model, _ = trained("roberta")  # its LM head holds a LayerNorm
    assert any(name.startswith("lm_head") for name in layers(model))
    model.save_pretrained(tmp_path)
    other = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert set(layers(other)) == {name for name in layers(model) if name.startswith("roberta")}


# --- after training, in a new process --------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
import hf_autonorm
from transformers import AutoModelForTokenClassification
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits = model(**torch.load(folder + "/inputs.pt")).logits
    torch.save((model.state_dict(), logits), folder + "/seen.pt")
"""


def train_20_steps(folder, dtype):
    """(the trained model, its inputs, its logits); it is saved in folder/final and folder/run/checkpoint-20."""
    start = perturb_norms(tf.BertForTokenClassification(tf.BertConfig(**{**K, "num_hidden_layers": 1}, num_labels=3)))
    start.save_pretrained(folder / "start")
    model = patch(tf.BertForTokenClassification.from_pretrained(folder / "start", dtype=dtype))
    ids = torch.randint(3, 64, (8, 6), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=20,
        logging_steps=20,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row % 3} for row in ids])
    trainer.train()
    trainer.save_model(str(folder / "final"))
    torch.save({"input_ids": ids}, folder / "final" / "inputs.pt")
    with torch.no_grad():
        return model, model.eval()(input_ids=ids).logits


def test_models_trained_by_the_stock_trainer_load_in_a_new_process(tmp_path):
    folders = {torch.float32: tmp_path / "float32", torch.bfloat16: tmp_path / "bfloat16"}
    trained_ones = {dtype: train_20_steps(folder, dtype) for dtype, folder in folders.items()}
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, *(str(folder / "final") for folder in folders.values())]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "MISSING" not in result.stderr and "UNEXPECTED" not in result.stderr
    for dtype, folder in folders.items():
        model, logits = trained_ones[dtype]
        state, theirs = torch.load(folder / "final" / "seen.pt")
        assert state.keys() == model.state_dict().keys()
        assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
        torch.testing.assert_close(theirs, logits, rtol=1e-6, atol=1e-6)
        checkpoint = folder / "run" / "checkpoint-20"
        assert_equal(tf.AutoModelForTokenClassification.from_pretrained(checkpoint, dtype=dtype), model)


def test_a_reloaded_model_is_an_ordinary_one(tmp_path):
    model, inputs = trained()
    model.save_pretrained(tmp_path / "saved")
    load = lambda: tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")  # noqa: E731
    loaded = load()
    assert not getattr(loaded, "is_quantized", False) and getattr(loaded, "hf_quantizer", None) is None
    for convert in (lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to("cpu")):
        converted = convert(load())
        assert all(layer.strength.dtype == torch.float32 for layer in layers(converted).values())
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False
    )
    rows = [{"input_ids": row, "labels": 1} for row in inputs["input_ids"]]
    Trainer(loaded, arguments, train_dataset=rows).train()
    assert not any(
        torch.equal(a, b)
        for a, b in zip(
            (m.bias_branches[0].bias for m in layers(loaded).values()),
            (m.bias_branches[0].bias for m in layers(model).values()),
        )
    )
    before = {k: v.clone() for k, v in loaded.state_dict().items()}
    loaded.init_weights()  # case 45: transformers initialises again what it takes for new
    assert all(same_bits(v, before[k]) for k, v in loaded.state_dict().items() if "bias_" in k)
    loaded.resize_token_embeddings(70)
    run(loaded.eval(), inputs)
    set_strength(loaded, 0.5)
    unpatch(loaded).save_pretrained(tmp_path / "stock")
    assert "quantization_config" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert not layers(tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "stock"))


def test_random_state_and_an_unpatched_model_beside_it(tmp_path):
    model, _ = trained()
    model.save_pretrained(tmp_path / "patched")
    build("bert")[0].save_pretrained(tmp_path / "plain")
    state = torch.get_rng_state()
    tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "patched")
    assert torch.equal(torch.get_rng_state(), state)
    plain = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert not layers(plain) and read_record(plain.config) is None


def test_pipelines(tmp_path):
    model, inputs = trained("vit")
    model.save_pretrained(tmp_path)
    tf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    from PIL import Image

    results = tf.pipeline("image-classification", model=str(tmp_path), device="cpu")(Image.new("RGB", (16, 16)))
    assert len(results) == 2 and all(0 <= r["score"] <= 1 for r in results)


# --- what cannot be loaded -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained()[0].save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    config = change(config) or config
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "part", ["alpha", "alpha_scale", "strength", "frozen", "statistics", "bias_gate.weight_in", "r2"]
)
@pytest.mark.parametrize("every", [True, False])
def test_a_missing_tensor_is_an_error_that_names_it(copy, part, every):
    state = load_file(copy / "model.safetensors")
    gone = [k for k in state if k.endswith("." + part)]
    gone = gone if every else gone[:1]
    save_file({k: v for k, v in state.items() if k not in gone}, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=gone[0].replace(".", r"\.")):
        tf.AutoModelForSequenceClassification.from_pretrained(copy)


def test_an_unpatched_checkpoint_with_a_patched_config(copy):
    bert().save_pretrained(copy / "plain")
    (copy / "model.safetensors").write_bytes((copy / "plain" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"not the checkpoint of a patched model.*call patch\(model\)"):
        tf.AutoModelForSequenceClassification.from_pretrained(copy)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            lambda q: q["patches"][0]["modules"].__setitem__(0, "bert.embeddings.LayrNorm"),
            CheckpointError,
            "LayrNorm.*nearest",
        ),
        (
            lambda q: q["patches"][0]["modules"].__setitem__(0, "bert.pooler.dense"),
            CheckpointError,
            "bert.pooler.dense",
        ),
        (lambda q: q["patches"][0]["modules"].__setitem__(0, 3), CheckpointError, "patches"),
        (lambda q: q["patches"][0]["spec"].__setitem__("streng", 1), ConfigError, "'strength'"),
        (lambda q: q["patches"][0]["spec"].__setitem__("branches", ["nope"]), ConfigError, "'nope'"),
        (lambda q: q["patches"][0]["spec"]["gate"].__setitem__("tau", -1), ConfigError, "tau"),
        (lambda q: q["patches"][0]["spec"]["gate"].__setitem__("colour", 1), ConfigError, "colour"),
        (lambda q: q["patches"][0].pop("spec"), CheckpointError, "spec"),
        (lambda q: q["patches"][0].pop("modules"), CheckpointError, "modules"),
        (lambda q: q.__setitem__("patches", None), CheckpointError, "patches"),
        (lambda q: q.__setitem__("patches", ["x"]), CheckpointError, "patches"),
        (lambda q: q.__setitem__("patches", {"spec": {}, "modules": []}), CheckpointError, "patches"),
        (lambda q: q.pop("patches"), CheckpointError, "expected"),
        (lambda q: q.__setitem__("patchs", q.pop("patches")), CheckpointError, "patchs"),
        (
            lambda q: q["patches"][0]["modules"].append("bert.encoder.layer.9.output.LayerNorm"),
            CheckpointError,
            "layer.9",
        ),
    ],
)
def test_an_edited_record_is_a_clear_error(copy, change, error, words):
    edit(copy, lambda config: change(config["quantization_config"]) and None)
    with pytest.raises(error, match=words) as caught:
        tf.AutoModelForSequenceClassification.from_pretrained(copy)
    assert isinstance(caught.value, AutoNormError)


def test_a_gate_of_another_size_is_an_error(copy):
    edit(copy, lambda c: c["quantization_config"]["patches"][0]["spec"]["gate"].__setitem__("hidden", 7))
    with pytest.raises((CheckpointError, RuntimeError), match="size|shape"):
        tf.AutoModelForSequenceClassification.from_pretrained(copy)


def test_asking_for_the_patch_of_a_plain_checkpoint(tmp_path, saved):
    bert().save_pretrained(tmp_path)
    record = AutoConfig.from_pretrained(saved).quantization_config
    with pytest.raises(CheckpointError, match=r"patch\(model\)"):
        AutoModel.from_pretrained(tmp_path, quantization_config=record)


def test_a_config_without_weights_builds_an_unpatched_model(saved):
    model = tf.AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(saved))
    model(**tokens())  # no crash; `from_pretrained` is the door
