"""Which modules are found, and what a wrapper makes of their conventions (README.md, rows 2 to 17)."""

import copy
import pickle
import signal

import pytest
import torch
from timm.layers import GroupNorm1, LayerNorm2d, RmsNorm2d
from timm.models.metaformer import LayerNorm2dNoBias
from torch import nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

from hf_autonorm import GateConfig, from_pretrained, patch, plan, save_pretrained, set_strength, unpatch
from hf_autonorm.nn import AutoNorm
from hf_autonorm.nn.affine import Correction
from tests import zoo
from tests.models import FAMILIES, build, perturb_gates, perturb_norms, run, same_bits

THE_NORM = GateConfig(kind="fixed", value=1.0)  # at full strength, the original through the whole formula


def autonorms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, AutoNorm)}


def close(a, b, tolerance=1e-5):
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


# --- row 2 -----------------------------------------------------------------------------------------------------------

CHANNELS_FIRST = {
    "timm LayerNorm2d": lambda: LayerNorm2d(8),
    "timm RmsNorm2d": lambda: RmsNorm2d(8),
    "timm without bias": lambda: LayerNorm2dNoBias(8),
    "transformers": lambda: ConvNextLayerNorm(8, data_format="channels_first"),
}


@pytest.mark.parametrize("kind", CHANNELS_FIRST)
def test_a_channels_first_norm_of_a_square_input(kind):
    """C = H = W: no shape error would tell a wrong axis."""
    norm = perturb_norms(CHANNELS_FIRST[kind]()).eval()
    x = torch.randn(2, 8, 8, 8)
    assert torch.allclose(patch(copy.deepcopy(norm), gate=THE_NORM)(x), norm(x), atol=1e-6)
    alone = patch(copy.deepcopy(norm), "dyt")
    branch = alone.bias_branches[0]
    weight, bias = (0.0 if t is None else t.view(1, 8, 1, 1) for t in (branch.weight, branch.bias))
    assert torch.allclose(alone(x), weight * torch.tanh(0.5 * x) + bias, atol=1e-6)
    pooled = perturb_gates(patch(copy.deepcopy(norm), gate=GateConfig(kind="softmax", granularity="sequence")))
    # The mean over H and W does not care about an order, that over C would.
    shuffled = x.flatten(2)[..., torch.randperm(64)].view_as(x)
    weights = [pooled.bias_gate(v.movedim(1, -1))[0] for v in (x, shuffled)]
    assert torch.allclose(*weights, atol=1e-6) and weights[0].shape == (2, 1, 1, 2)


@pytest.mark.parametrize("family", ["convnext", "timm_convnext"])
def test_channels_first_models_on_an_oblong_image(family):
    (model, _), (plain, _) = build(family), build(family)
    inputs = {key: torch.randn(2, 3, 64, 96) for key in FAMILIES[family][1]()}
    expected = run(plain, inputs)
    patch(model, strength=0.0)
    assert all(same_bits(a, b) for a, b in zip(run(model, inputs), expected))
    assert close(run(patch(unpatch(model), gate=THE_NORM), inputs), expected)


# --- rows 4, 6, 7: conventions of the parameters ---------------------------------------------------------------------

ONE_PLUS_W = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "recurrent_gemma", "t5gemma")
WITHOUT_BIAS = ("modernbert", "cohere", "mpt")
WITHOUT_PARAMETERS = ("olmo",)


@pytest.mark.parametrize("name", ONE_PLUS_W)
def test_an_offset_of_the_scale_is_honoured(name):
    """w stands for 1 + w in these classes: every branch starts from what the norm really does."""
    (model, inputs), (plain, _) = zoo.build(name), zoo.build(name)
    offset = 0
    for wrapper in autonorms(patch(model, gate=THE_NORM)).values():
        own = wrapper.original.weight
        if type(wrapper.original).__name__.startswith(("Gemma", "Nemotron", "Qwen3Next", "Recurrent", "T5Gemma")):
            assert torch.allclose(wrapper.bias_branches[0].weight, 1 + own, atol=1e-5)
            offset += 1
    assert offset > 1
    assert close(*(zoo_run(m, inputs) for m in (model, plain)))


def zoo_run(model, inputs):
    return [t for _, t in zoo.float_outputs(zoo.run_forward(model, inputs))]


@pytest.mark.parametrize("name", WITHOUT_BIAS + WITHOUT_PARAMETERS)
def test_no_parameter_appears_that_the_norm_does_not_have(name, tmp_path):
    """A norm without bias (scale) gets a branch without; Identity in a norm's place stays."""
    (model, inputs), (plain, _) = zoo.build(name), zoo.build(name)
    identities = {n for n, m in model.named_modules() if isinstance(m, nn.Identity)}
    patch(model, gate=GateConfig(kind="softmax"), strength=0.0)
    assert identities == {n for n, m in model.named_modules() if isinstance(m, nn.Identity)}
    found = autonorms(model)
    assert found
    for wrapper in found.values():
        had = {own for own, _ in wrapper.original.named_parameters()}
        new = {own for own, _ in wrapper.bias_branches[0].named_parameters()}
        assert new == {"alpha"} | had & {"weight", "bias"}
    assert all(same_bits(a, b) for a, b in zip(zoo_run(model, inputs), zoo_run(plain, inputs)))
    set_strength(model, 1.0)
    outputs = [t for _, t in zoo.float_outputs(model.train()(**inputs))]
    sum(t.square().sum() for t in outputs).backward()
    assert all(p.grad is not None for w in found.values() for p in w.new_parameters())
    save_pretrained(model.eval(), tmp_path, card=False)
    again = from_pretrained(tmp_path)
    assert all(same_bits(t, again.state_dict()[k]) for k, t in model.state_dict().items())


BARE = (
    nn.LayerNorm(8, elementwise_affine=False),
    nn.LayerNorm(8, bias=False),
    nn.RMSNorm(8, elementwise_affine=False),
)


@pytest.mark.parametrize("norm", BARE, ids=str)
def test_bare_norms_without_scale_or_shift(norm):
    x = torch.randn(3, 8)
    wrapped = patch(copy.deepcopy(norm), gate=THE_NORM)
    assert torch.allclose(wrapped(x), norm(x), atol=1e-6)
    had = {name for name, _ in norm.named_parameters()}
    assert {name for name, _ in wrapped.bias_branches[0].named_parameters()} == {"alpha"} | had


# --- rows 10 to 13 ---------------------------------------------------------------------------------------------------


class Owner(nn.Module):
    """Holds parameters in a list beside its norm."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.inner = nn.ModuleDict({"a": nn.LayerNorm(8)})

    def forward(self, x):
        return self.inner["a"](x) * self.scales[0]


def test_every_depth_is_reached_and_the_root_too():
    deep = nn.Sequential(nn.Sequential(Owner(), nn.ModuleList([nn.LayerNorm(8)])), nn.LayerNorm(8))
    count = sum(isinstance(m, nn.LayerNorm) for m in deep.modules())
    assert len(plan(deep).patched) == count == 3
    assert len(autonorms(patch(deep))) == count and isinstance(deep[0][0].inner["a"], AutoNorm)
    assert isinstance(patch(nn.LayerNorm(8)), AutoNorm)


@pytest.mark.parametrize("family", ["timm_vit", "bert", "llama", "gpt2"])
def test_patching_ends_and_does_not_find_its_own_layers(family):
    """A wrapper holds the old type: a walk that goes on into what it has just put in never ends."""

    def too_long(*_):
        raise TimeoutError("patch does not end")

    model, _ = build(family)
    expected = len(plan(model, None, linear="affine_like", heads=True).patched)
    kinds = (nn.Linear,) if family != "gpt2" else (type(model.transformer.h[0].attn.c_attn),)
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    assert expected == sum(isinstance(m, kinds) and m is not embeddings for m in model.modules())
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        patch(model, linear="affine_like", heads=True)
        ids = {name: id(m) for name, m in model.named_modules()}
        patch(model, linear="affine_like", heads=True)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert ids == {name: id(m) for name, m in model.named_modules()}
    assert sum(isinstance(m, Correction) for m in model.modules()) == expected


def test_norms_over_batch_groups_or_space_are_left_alone_with_a_reason():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), LayerNorm2d(8), nn.GroupNorm(2, 8), GroupNorm1(8), nn.InstanceNorm2d(8)
    ).eval()
    net[1].running_mean.normal_(), net[1].running_var.uniform_(0.5, 2)
    running = {k: v.clone() for k, v in net[1].state_dict().items()}
    twin, x = copy.deepcopy(net), torch.randn(2, 3, 5, 5)
    reasons = {row.name: row.reason for row in plan(net)}
    assert reasons["2"] is None and all("normalises over" in reasons[i] for i in "1345")
    patch(net, strength=0.0)
    assert [type(a) is type(b) for a, b in zip(net, twin)] == [True, True, False, True, True, True]
    assert all(same_bits(v, net[1].state_dict()[k]) for k, v in running.items()) and torch.equal(net(x), twin(x))


# --- row 16 ----------------------------------------------------------------------------------------------------------


PRINTED = [entry for entry in zoo.sample(8) if entry.name != "test_resnet"]  # it has neither norms nor linears inside


@pytest.mark.parametrize("entry", PRINTED, ids=str)
def test_a_patched_model_prints_itself_in_every_state(entry):
    model, _ = entry.build()
    patch(model, linear="affine_like")
    layers = autonorms(model)
    for layer in layers.values():
        layer.freeze()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.bfloat16)):
        text = repr(one)
        assert str(one) == text and all("frozen=True" in repr(layer) for layer in autonorms(one).values())
        assert "frozen=True" in text and "frozen=False" not in text and "strength=1" in text and "AffineLike" in text
    for layer in layers.values():
        layer.unfreeze()
    assert "frozen=True" not in repr(model)


# --- row 17 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", zoo.sample(6), ids=str)
def test_a_wrapper_shows_the_attributes_of_its_norm(entry):
    model, _ = entry.build()
    names = ("eps", "variance_epsilon", "normalized_shape", "weight", "bias")
    modules = dict(model.named_modules())
    rows = plan(model).patched
    shown = {row.name: {n: getattr(modules[row.name], n, "none") for n in names} for row in rows}
    if rows:
        patch(model)
    for name, values in shown.items():
        for attribute, value in values.items():
            found = getattr(model.get_submodule(name), attribute, "none")
            assert found is value or found == value
