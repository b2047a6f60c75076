"""A patch and another library's quantisation in one model, through our from_pretrained."""

import importlib.util
import json

import pytest
import torch
import transformers as tf

from hf_autonorm import from_pretrained, patch, save_pretrained
from hf_autonorm.errors import ConfigError, UnsupportedError
from hf_autonorm.nn import AffineLike, AutoNorm
from hf_autonorm.patching.record import read_record, wrappers
from tests.models import perturb_gates, tokens


def torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return tf.TorchAoConfig(Int8WeightOnlyConfig(version=2))


# name → (package, its config, how like the output stays, whether transformers can save it again)
QUANTISERS = {
    "torchao int8": ("torchao", torchao, 0.999, True),
    "bitsandbytes int8": ("bitsandbytes", lambda: tf.BitsAndBytesConfig(load_in_8bit=True), 0.999, True),
    "bitsandbytes nf4": ("bitsandbytes", lambda: tf.BitsAndBytesConfig(load_in_4bit=True), 0.9, True),
    "quanto int8": ("optimum.quanto", lambda: tf.QuantoConfig(weights="int8"), 0.999, False),
}


def available(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = tf.LlamaConfig(**sizes, intermediate_size=128, vocab_size=64)
    model = perturb_gates(patch(tf.LlamaForCausalLM(config).eval(), linear="affine_like"))
    return model, save_pretrained(model, tmp_path_factory.mktemp("model") / "model", card=False)


@pytest.mark.parametrize("name", QUANTISERS)
@torch.no_grad()
def test_quantised_while_loading(saved, tmp_path, name):
    package, config, likeness, serializable = QUANTISERS[name]
    if not available(package):
        pytest.skip(f"{package} is not installed")
    model, folder = saved
    quantised = from_pretrained(folder, quantization_config=config())
    stock = tf.LlamaForCausalLM(model.config.__class__(**{**model.config.to_dict(), "quantization_config": None}))
    stock.save_pretrained(tmp_path / "stock")
    reference = tf.LlamaForCausalLM.from_pretrained(tmp_path / "stock", quantization_config=config())
    inner = type(reference.model.layers[0].mlp.up_proj)
    found = dict(wrappers(quantised))
    assert found.keys() == dict(wrappers(model)).keys()
    for path, layer in found.items():
        if isinstance(layer, AffineLike):
            assert type(layer.original) is inner and layer.scalar("gain") == 1
            assert type(layer.original.weight) is type(reference.model.layers[0].mlp.up_proj.weight), path
        elif isinstance(layer, AutoNorm):  # what the patch added is not quantised: the same bits
            for a, b in zip(layer.new_parameters(), dict(wrappers(model))[path].new_parameters(), strict=True):
                assert torch.equal(a, b.to(a.dtype))
    outputs, expected = (m(**tokens()).logits.float().flatten() for m in (quantised, model))
    assert torch.cosine_similarity(outputs, expected, dim=0) > likeness
    assert read_record(quantised.config) == read_record(model.config)
    assert quantised.config.quantization_config.quant_method == config().quant_method

    if not serializable:
        with pytest.raises(ValueError, match="not serializable"):
            save_pretrained(quantised, tmp_path / "again", card=False)
        return
    with pytest.raises(UnsupportedError, match="quantised by another library"):
        save_pretrained(quantised, tmp_path / "again", card=False, custom_code=True)
    save_pretrained(quantised, tmp_path / "again", card=False)
    quantised.save_pretrained(tmp_path / "stock again")
    stock_door = tf.AutoModelForCausalLM.from_pretrained
    for door, name in ((stock_door, "again"), (from_pretrained, "again"), (from_pretrained, "stock again")):
        again = door(tmp_path / name)
        assert dict(wrappers(again)).keys() == found.keys()
        torch.testing.assert_close(again(**tokens()).logits.float().flatten(), outputs, rtol=1e-6, atol=1e-6)
        assert read_record(again.config) == read_record(model.config)
        with pytest.raises(ConfigError, match="quantised by .* already"):
            from_pretrained(tmp_path / name, quantization_config=config())
    unchanged = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert unchanged["quant_method"] == "autonorm" and unchanged.keys() == {"quant_method", "version", "patches"}


def test_a_plain_checkpoint_needs_nothing_of_ours(saved, tmp_path):
    """`quantization_config` of an unpatched folder goes straight to transformers."""
    from hf_autonorm.hub.stacking import stacked_options

    options = {"quantization_config": tf.QuantoConfig(weights="int8"), "dtype": "auto"}
    assert stacked_options(tmp_path, {"model_type": "llama"}, options) is options
    assert stacked_options(saved[1], json.loads((saved[1] / "config.json").read_text()), {"dtype": "auto"}) == {
        "dtype": "auto"
    }


def test_the_stock_door_refuses(saved):
    """transformers takes one quantiser a model; it says so, nothing is loaded without the patch."""
    with pytest.raises(ValueError, match="AutoNormQuantizationConfig"):
        tf.AutoModelForCausalLM.from_pretrained(saved[1], quantization_config=tf.QuantoConfig(weights="int8"))
