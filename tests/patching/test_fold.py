"""`fold`: what no longer adapts collapses, what does stays."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from hf_autonorm import GateConfig, fold, patch, unpatch
from hf_autonorm.errors import ConfigError, NotPatchedError
from hf_autonorm.nn import AutoNorm

IDS = torch.arange(18).view(2, 9)


def bert() -> BertModel:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    return BertModel(BertConfig(**shape)).eval()


def settle(layer: AutoNorm, choice: int) -> None:
    """Drives a gate to one choice, whatever the input."""
    with torch.no_grad():
        layer.bias_gate.bias_out.fill_(-20.0)
        layer.bias_gate.bias_out[choice] = 20.0


@torch.no_grad()
def output(model):
    return model(IDS).last_hidden_state


@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
def test_settled_on_the_original_gives_a_stock_model(granularity):
    model = bert()
    stock, modules = output(model), {name: id(m) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    patch(model, gate=GateConfig(granularity=granularity))
    for layer in [m for m in model.modules() if isinstance(m, AutoNorm)]:
        settle(layer, 0)
        if granularity != "layer":
            torch.nn.init.normal_(layer.bias_gate.weight_out, std=1e-3)  # depends on the input, within the tolerance
    model = fold(model, [{"input_ids": IDS}])
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert torch.equal(output(model), stock)
    assert model.state_dict().keys() == state.keys() and not hasattr(model.config, "quantization_config")


def test_settled_on_a_branch_becomes_that_branch_and_reloads(tmp_path):
    model = patch(bert(), branches=["rms_norm", "dyt"])
    for layer in [m for m in model.modules() if isinstance(m, AutoNorm)]:
        settle(layer, 2)
    before = output(model)
    model = fold(model)
    layers = [m for m in model.modules() if isinstance(m, AutoNorm)]
    assert all(layer.branch_names == ("dyt",) and layer.replaces for layer in layers)
    assert torch.allclose(output(model), before, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.allclose(output(loaded), output(model), atol=1e-6)
    unpatch(model)


def test_what_still_adapts_stays():
    model = patch(bert())
    for layer in [m for m in model.modules() if isinstance(m, AutoNorm)]:
        torch.nn.init.normal_(layer.bias_gate.weight_out)
    before, count = output(model), sum(isinstance(m, AutoNorm) for m in model.modules())
    with pytest.warns(UserWarning, match=f"{count} gates depend on their input"):
        fold(model)
    with pytest.warns(UserWarning, match="changed nothing: .*The nearest is '") as said:
        fold(model, [{"input_ids": IDS}])
    assert sum(isinstance(m, AutoNorm) for m in model.modules()) == count
    assert torch.equal(output(model), before)
    nearest, weight = re.search(
        r"nearest is '(.+?)', whose weight of '\w+' is ([\d.]+)", str(said[0].message)
    ).groups()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fold(model, [{"input_ids": IDS}], tolerance=min(0.49, 1.001 - float(weight)))
    left = {name for name, m in model.named_modules() if isinstance(m, AutoNorm) and not m.replaces}
    assert nearest not in left and len(left) < count  # what the words say helps


def test_strength_zero_is_the_original_already():
    norm = nn.LayerNorm(4)
    assert fold(patch(norm, strength=0.0)) is norm


def test_bad_arguments():
    with pytest.raises(NotPatchedError, match="nothing to fold"):
        fold(nn.LayerNorm(4))
    with pytest.raises(ConfigError, match="tolerance"):
        fold(patch(nn.LayerNorm(4)), tolerance=0.7)
