"""Models whose weights accelerate keeps elsewhere: a patch reads the real values and computes where the model does."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import LlamaConfig, LlamaForCausalLM

from hf_autonorm import patch, set_strength, unpatch

IDS = torch.arange(18).view(2, 9) % 64


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("norm", ["autonorm", "dyt"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_model_patches_as_a_plain_one(tmp_path, norm, where):
    model = llama()
    before, patched = logits(model), logits(patch(copy.deepcopy(model), norm))
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    patch(model, norm, strength=0.0)
    assert torch.equal(logits(model), before)
    set_strength(model, 1.0)
    assert torch.equal(logits(model), patched)
    assert torch.equal(logits(unpatch(model)), before)


def test_patched_folder_loads_with_a_device_map(tmp_path):
    model = patch(llama(), "dyt")
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert all(p.is_meta for p in loaded.model.norm.parameters())
    assert torch.equal(logits(loaded), logits(model))
