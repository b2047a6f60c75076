"""PEFT above and below a patch."""

import copy as copies
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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


LINEARS_INSIDE = (["query.original"], r".*attention.*\.(query|value)\.original", "all-linear")


@pytest.mark.parametrize("form", ["affine_like", "norm_like"])
@pytest.mark.parametrize("target", LINEARS_INSIDE, ids=str)
def test_lora_goes_onto_the_linear_inside_a_patched_one(form, target, tmp_path):
    """Inside the division, where merging is exact; the wrapper itself is refused."""
    model, inputs = build("bert")
    patch(model, None, linear=form, include=r".*attention.self\..*")
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(copies.deepcopy(model), LoraConfig(target_modules=["query"]))
    before = model(**inputs).logits
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules=target, r=2, init_lora_weights=False)).eval()
    layer = adapted.base_model.model.bert.encoder.layer[0].attention.self.query
    assert isinstance(layer, Wrapper) and hasattr(layer.original, "lora_A")
    expected = adapted(**inputs).logits
    assert not torch.equal(expected, before)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(again(**inputs).logits, expected, atol=1e-6)
    merged = adapted.merge_and_unload()
    assert torch.allclose(merged(**inputs).logits, expected, atol=1e-5)
    assert type(unpatch(merged).bert.encoder.layer[0].attention.self.query) is torch.nn.Linear


def test_a_patch_put_on_an_adapter_says_that_peft_will_not_save_it():
    with pytest.warns(UserWarning, match="PEFT saves the adapter alone.*Patch before PEFT"):
        patch(lora(gpt2()))


@pytest.mark.parametrize("copy", ["deepcopy", "pickle"])
def test_copies_are_independent(copy):
    model = patch(gpt2())
    twin = copies.deepcopy(model) if copy == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = logits(model)
    assert torch.equal(logits(twin), expected)
    unpatch(twin)
    assert torch.equal(logits(model), expected) and not torch.equal(logits(twin), expected)
