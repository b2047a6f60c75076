"""Modules that others bypass, read or address by name (README.md, rows 21 to 28)."""

import pytest
import timm
import torch
from torch import nn

from hf_autonorm import from_pretrained, patch, plan, save_pretrained
from hf_autonorm.nn import Wrapper
from tests import zoo
from tests.guarantees import calls, tensors
from tests.models import build, same_bits

# They compute q, k and v from the weight itself, or hand it to a kernel.
READERS = {
    "beit": lambda: timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=4),
    "eva": lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28, embed_dim=48, depth=1, num_heads=4),
    "swinv2": lambda: timm.create_model(
        "swinv2_tiny_window8_256", img_size=64, embed_dim=16, depths=(1,), num_heads=(2,), window_size=4
    ),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_what_is_reported_as_patched_is_called(name, train):
    torch.manual_seed(0)
    model = READERS[name]().train(train)
    size = {"beit": 32, "eva": 28, "swinv2": 64}[name]
    rows = plan(model, linear="affine_like", conv="affine_like").patched
    patch(model, linear="affine_like", conv="affine_like")
    names = {m: n for n, m in model.named_modules() if isinstance(m, Wrapper)}
    assert sorted(names.values()) == sorted(row.name for row in rows)
    with calls(names) as called:
        model(torch.randn(2, 3, size, size))
    assert called == set(names.values())


@pytest.mark.parametrize("name", ["beit", "swinv2"])
def test_a_layer_whose_weight_is_read_is_reported(name):
    reasons = {row.name: row.reason for row in plan(READERS[name](), None, linear="affine_like")}
    read = [reason for name, reason in reasons.items() if name.endswith("attn.qkv")]
    assert read and all("reads its weight directly" in reason for reason in read)


@pytest.mark.parametrize("name", ["t5/seq2seq_lm", "clip/base", "mamba/base", "whisper/base"])
def test_a_wrapper_has_the_attributes_of_its_linear(name):
    model, _ = zoo.build(*name.split("/"))
    attributes = ("weight", "bias", "in_features", "out_features", "kernel_size", "stride", "groups")
    fields = dict(linear="norm_like", conv="norm_like") if _has_conv(model) else dict(linear="norm_like")
    modules = dict(model.named_modules())
    patched = {row.name: modules[row.name] for row in plan(model, None, **fields).patched}
    had = {name: {a: getattr(m, a) for a in attributes if hasattr(m, a)} for name, m in patched.items()}
    patch(model, None, **fields)
    for name, values in had.items():
        wrapper = model.get_submodule(name)
        assert isinstance(wrapper, Wrapper) and isinstance(wrapper.weight, torch.Tensor)
        assert all(getattr(wrapper, a) is v or getattr(wrapper, a) == v for a, v in values.items())


def _has_conv(model):
    return any(isinstance(m, (nn.Conv1d, nn.Conv2d)) for m in model.modules())


@pytest.mark.parametrize("name", ["clip/base", "t5/seq2seq_lm", "bert/base", "gemma2/base", "vit/image_cls"])
def test_initialising_again_leaves_a_patched_model_as_it_is(name, tmp_path):
    """`init_weights` addresses children by name and class, and must not take loaded weights for fresh ones."""
    model, inputs = zoo.build(*name.split("/"))
    fields = dict(linear="affine_like", conv="affine_like") if _has_conv(model) else dict(linear="affine_like")
    patch(model, **fields)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    save_pretrained(model, tmp_path, card=False)
    loaded = from_pretrained(tmp_path)
    state = {k: t.clone() for k, t in loaded.state_dict().items()}
    expected = tensors(loaded(**inputs))
    loaded.init_weights()
    assert all(same_bits(t, state[k]) for k, t in loaded.state_dict().items())
    assert all(same_bits(a, b) for a, b in zip(tensors(loaded(**inputs)), expected))


@pytest.mark.parametrize("name", ["clip/base", "bert/base"])
def test_initialising_a_freshly_patched_model_leaves_the_patch_alone(name):
    model, _ = zoo.build(*name.split("/"))
    patch(model)
    added = {id(p): p.clone() for m in model.modules() if isinstance(m, Wrapper) for p in m.new_parameters()}
    model.init_weights()
    assert added and all(same_bits(p, added[id(p)]) for p in model.parameters() if id(p) in added)


@pytest.mark.parametrize("entry", [("bit", "base"), ("timm", "resnetv2_50x1_bit"), ("timm", "nf_resnet26")], ids=str)
def test_convolutions_of_another_contract_stay(entry):
    """Weight standardisation, SAME padding: the module's own forward does more than its weight says."""
    if entry[0] == "timm":
        model = timm.create_model(entry[1], pretrained=False, num_classes=3)
    else:
        model, _ = zoo.build(*entry)
    strict = {
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and type(m).forward is not nn.Conv2d.forward
    }
    reasons = {row.name: row.reason for row in plan(model, None, conv="affine_like")}
    assert strict and all("forward of its own" in reasons[name] for name in strict)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "gemma"])
def test_a_patched_models_vocabulary_can_be_resized(family, tie):
    model, inputs = build(family, tie_word_embeddings=tie)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied or not tie
    patch(model, linear="affine_like", heads=True)
    old = [m.weight.detach().clone() for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    model.resize_token_embeddings(70)
    assert model(**inputs).logits.shape[-1] == 70
    for before, module in zip(old, (model.get_input_embeddings(), model.get_output_embeddings())):
        assert same_bits(module.weight[: len(before)].detach(), before)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
