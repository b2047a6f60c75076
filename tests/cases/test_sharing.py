"""Shared modules, tied weights, and weights that are views (README.md, rows 33 to 38)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from hf_autonorm import GateConfig, GateFreezeCallback, from_pretrained, patch, save_pretrained, set_strength
from hf_autonorm.nn import AutoNorm, Wrapper
from tests import zoo
from tests.models import albert, build, perturb_norms, run, same_bits, tokens
from tests.test_callbacks import Rows, trainer

ROOT = Path(__file__).resolve().parents[2]


def autonorms(model):
    return [m for m in model.modules() if isinstance(m, AutoNorm)]


def test_a_module_that_is_called_several_times_is_one():
    torch.manual_seed(0)
    model = perturb_norms(albert()).eval()
    norms = {id(m) for m in model.modules() if isinstance(m, torch.nn.LayerNorm)}
    expected = run(model, tokens())
    patch(model, strength=0.0)
    assert len(autonorms(model)) == len(norms) == 3
    assert all(same_bits(a, b) for a, b in zip(run(model, tokens()), expected))
    set_strength(model, 1.0)
    model.train()
    sum(t.square().sum() for t in run(model, tokens())).backward()
    assert all(p.grad is not None for layer in autonorms(model) for p in layer.new_parameters())


def test_schedules_count_steps_not_calls(tmp_path):
    """ALBERT's layer runs three times a step; the freeze at step 2 comes after two optimizer steps."""
    config = tf.AlbertConfig(
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48},
        vocab_size=64,
        embedding_size=16,
    )
    model = patch(tf.AlbertForSequenceClassification(config), gate=GateConfig(init_norm_weight=0.6))
    callback = GateFreezeCallback(freeze_step=2, rule="always")
    trainer(tmp_path, [callback], model, Rows(16), max_steps=3).train()
    assert callback.decision["step"] == 2 and callback.decision["layers"] == len(autonorms(model)) == 3
    assert len(callback.history[0]["layers"]) == 3  # each module once


@pytest.mark.parametrize("name", ["gpt2/causal_lm", "bert/masked_lm", "t5/seq2seq_lm"])
def test_a_tie_holds_from_the_patch_to_the_reload(name, tmp_path):
    """After training, saving and loading: one tensor in both places, the same logits."""
    model, inputs = zoo.build(*name.split("/"))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied
    patch(model, linear="affine_like", heads=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        sum(t.square().mean() for t in run(model.train(), inputs)).backward()
        optimizer.step()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    save_pretrained(model.eval(), tmp_path, card=False)
    loaded = from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    for a, b in zip(run(model, inputs), run(loaded, inputs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["convnext", "timm_convnext", "gpt2"])
def test_views_and_channels_last_weights_can_be_saved(name, tmp_path):
    model, inputs = build(name)
    model = model.to(memory_format=torch.channels_last) if "conv" in name else model
    old = {p.data_ptr() for p in model.parameters()}
    patch(model, linear="affine_like", **(dict(conv="affine_like") if "conv" in name else {}))
    added = [p for m in model.modules() if isinstance(m, Wrapper) for p in m.new_parameters()]
    assert added and all(p.is_contiguous() and p.data_ptr() not in old for p in added)
    state = model.state_dict()
    state.pop("lm_head.weight", None)
    save_file({k: t.contiguous() for k, t in state.items()}, tmp_path / "plain.safetensors")
    assert all(torch.equal(t, state[k]) for k, t in load_file(tmp_path / "plain.safetensors").items())
    save_pretrained(model, tmp_path / "saved", card=False)
    loaded = from_pretrained(tmp_path / "saved", **({"model": build(name)[0]} if name.startswith("timm") else {}))
    assert all(torch.equal(t, loaded.state_dict()[k]) for k, t in model.state_dict().items())
    for a, b in zip(run(model, inputs), run(loaded, inputs)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_ranks_of_a_shared_layer_and_sharded_parameters():
    """In one start of two processes: ALBERT under DDP with checkpointing, and `fully_shard` over patched models."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.cases.two_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank 0: fine") == done.stdout.count("rank 1: fine") == 1
