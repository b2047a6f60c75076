"""PEFT above and below a patch."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_autonorm import patch, unpatch
from hf_autonorm.nn import AutoNorm, Wrapper
from tests.models import build

IDS = torch.arange(18).view(2, 9)


def gpt2():
    return build("gpt2")[0].eval()


def lora(model, **fields):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False, **fields)).eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_lora_on_a_patched_model_trains_merges_and_reloads(tmp_path):
    """The order for sharing: patch, save, then LoRA on top."""
    model = patch(gpt2())
    model.save_pretrained(tmp_path / "base")
    adapted = lora(model)
    adapted(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert torch.allclose(logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()), expected, atol=1e-6)
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert sum(isinstance(m, AutoNorm) for m in merged.modules()) == 5


def test_a_patch_on_a_lora_model_keeps_its_switches():
    """`modules_to_save` routes between two copies of a norm: both are patched, the router stays."""
    adapted = lora(gpt2(), modules_to_save=["ln_f"])
    with torch.no_grad():
        adapted.base_model.model.transformer.ln_f.modules_to_save["default"].weight.add_(0.5)
    on = logits(adapted)
    with adapted.disable_adapter():
        off = logits(adapted)
    patch(adapted, strength=0.0)
    router = adapted.base_model.model.transformer.ln_f
    assert isinstance(router.original_module, AutoNorm) and isinstance(router.modules_to_save["default"], AutoNorm)
    assert torch.equal(logits(adapted), on) and not torch.equal(on, off)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), off)
    unpatch(adapted)
    assert torch.equal(logits(adapted), on) and not any(isinstance(m, Wrapper) for m in adapted.modules())


def test_lora_does_not_reach_into_a_patched_linear():
    """A merge would add the adapter inside the division: PEFT refuses the wrapper, or takes the linear inside it."""
    model = patch(gpt2(), None, linear="affine_like")
    before = logits(model)
    try:
        adapted = lora(model)
    except ValueError:
        return
    expected = logits(adapted)
    assert not torch.equal(expected, before)
    assert torch.allclose(logits(adapted.merge_and_unload()), expected, atol=1e-5)


@pytest.mark.parametrize("copy", ["deepcopy", "pickle"])
def test_copies_are_independent(copy):
    import copy as copies
    import pickle

    model = patch(gpt2())
    twin = copies.deepcopy(model) if copy == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = logits(model)
    assert torch.equal(logits(twin), expected)
    unpatch(twin)
    assert torch.equal(logits(model), expected) and not torch.equal(logits(twin), expected)
