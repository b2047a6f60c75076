"""`measure` tells what any norm does, from outside, and refuses what is none."""

import pytest
import timm.layers as tl
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models.metaformer import LayerNorm2dNoBias
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_autonorm.nn import NotANorm, measure

# name → (builder by width, channel axis, centered, learns weight, learns bias, what is added to the weight)
NORMS = {
    "nn.LayerNorm": (lambda d: nn.LayerNorm(d), -1, True, True, True, 0),
    "nn.LayerNorm, large eps": (lambda d: nn.LayerNorm(d, eps=0.5), -1, True, True, True, 0),
    "nn.LayerNorm, no bias": (lambda d: nn.LayerNorm(d, bias=False), -1, True, True, False, 0),
    "nn.LayerNorm, no affine": (lambda d: nn.LayerNorm(d, elementwise_affine=False), -1, True, False, False, 0),
    "nn.RMSNorm": (lambda d: nn.RMSNorm(d), -1, False, True, False, 0),
    "nn.RMSNorm, no affine": (lambda d: nn.RMSNorm(d, elementwise_affine=False), -1, False, False, False, 0),
    "T5": (T5LayerNorm, -1, False, True, False, 0),
    "Llama": (LlamaRMSNorm, -1, False, True, False, 0),
    "Gemma": (GemmaRMSNorm, -1, False, True, False, 1),
    "Gemma 3": (Gemma3RMSNorm, -1, False, True, False, 1),
    "Qwen3-Next": (Qwen3NextRMSNorm, -1, False, True, False, 1),
    "Nemotron": (lambda d: NemotronLayerNorm1P(d), -1, True, True, True, 1),
    "OLMo": (OlmoLayerNorm, -1, True, False, False, 0),
    "Cohere": (CohereLayerNorm, -1, True, True, False, 0),
    "ConvNeXt, channels last": (ConvNextLayerNorm, -1, True, True, True, 0),
    "ConvNeXt, channels first": (lambda d: ConvNextLayerNorm(d, data_format="channels_first"), 1, True, True, True, 0),
    "timm LayerNorm": (tl.LayerNorm, -1, True, True, True, 0),
    "timm LayerNorm2d": (tl.LayerNorm2d, 1, True, True, True, 0),
    "timm LayerNorm2dNoBias": (LayerNorm2dNoBias, 1, True, True, False, 0),
    "timm RmsNorm": (tl.RmsNorm, -1, False, True, False, 0),
    "timm RmsNorm2d": (tl.RmsNorm2d, 1, False, True, False, 0),
}


@torch.no_grad()
def perturbed(name, width, seed):
    norm = NORMS[name][0](width)
    generator = torch.Generator().manual_seed(seed)
    for p in norm.parameters():
        p.add_(torch.randn(p.shape, generator=generator))
    return norm


def plain(traits, x):
    """weight ⊙ (x − μ)/σ + bias, or with the rms, in float64."""
    x = x.double().movedim(traits.channel_axis, -1)
    if traits.centered:
        x = x - x.mean(-1, keepdim=True)
    y = traits.weight.double() * x / x.square().mean(-1, keepdim=True).sqrt() + traits.bias.double()
    return y.movedim(-1, traits.channel_axis)


@pytest.mark.parametrize("name", sorted(NORMS))
@given(st.integers(2, 40), st.integers(0, 100))
def test_the_measured_norm_is_the_norm(name, width, seed):
    _, axis, centered, learns_weight, learns_bias, offset = NORMS[name]
    norm = perturbed(name, width, seed)
    traits = measure(norm)
    assert (traits.width, traits.channel_axis, traits.centered) == (width, axis, centered)
    assert (traits.learns_weight, traits.learns_bias) == (learns_weight, learns_bias)
    shape = (2, width, 3, 4) if axis == 1 else (2, 3, width)
    x = 50 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    y = norm(x).double()
    if width > 2:  # of two channels (x − μ)/σ is ±1, unless both are nearly alike
        torch.testing.assert_close(y, plain(traits, x), rtol=5e-3, atol=5e-3 * y.abs().max().item())
    if learns_weight:  # read off exactly, not up to rounding
        assert torch.equal(traits.weight, offset + norm.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_half_precision_norms_measure_the_same(name, dtype):
    traits, half = measure(perturbed(name, 16, 0).to(dtype).float()), measure(perturbed(name, 16, 0).to(dtype))
    assert torch.equal(half.weight, traits.weight) and torch.equal(half.bias, traits.bias)
    assert (half.channel_axis, half.centered, half.layout) == (traits.channel_axis, traits.centered, traits.layout)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_meta_norms(name):
    traits, real = measure(NORMS[name][0](16).to("meta")), measure(NORMS[name][0](16))
    for field in ("width", "channel_axis", "centered", "learns_weight", "learns_bias", "layout"):
        assert getattr(traits, field) == getattr(real, field), field


@pytest.mark.parametrize("surroundings", ["meta", "half", "autocast", "inference"])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_surroundings_do_not_matter(name, surroundings):
    norm = perturbed(name, 16, 0)
    expected = measure(norm)
    default = torch.get_default_dtype()
    try:
        if surroundings == "meta":
            with torch.device("meta"):
                found = measure(norm)
        elif surroundings == "half":
            torch.set_default_dtype(torch.float16)
            found = measure(norm)
        elif surroundings == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                found = measure(norm)
        else:
            with torch.inference_mode():
                found = measure(norm)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.bias, expected.bias)
    assert found.weight.dtype == torch.float32 and found.weight.device.type == "cpu"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_measuring_changes_nothing(name, training):
    norm = perturbed(name, 16, 0).train(training)
    called = []
    norm.register_forward_hook(lambda *_: called.append(1))
    norm.register_forward_pre_hook(lambda *_: called.append(1))
    attributes = {k: id(v) for k, v in vars(norm).items()}
    tensors = {k: (id(p), p._version, p.detach().clone(), p.requires_grad) for k, p in norm.named_parameters()}
    state = torch.get_rng_state()
    measure(norm)
    assert torch.equal(torch.get_rng_state(), state) and not called
    assert {k: id(v) for k, v in vars(norm).items()} == attributes and norm.training == training
    for k, p in norm.named_parameters():
        assert (id(p), p._version, p.requires_grad) == tuple(tensors[k][i] for i in (0, 1, 3))
        assert torch.equal(p, tensors[k][2]) and p.grad is None


class Gated(nn.Module):
    """A norm whose forward asks for more than its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, gate):
        return self.weight * nn.functional.rms_norm(x * gate, self.weight.shape)


class Widening(nn.LayerNorm):
    def forward(self, x):
        return torch.cat([super().forward(x)] * 2, -1)


class Residual(nn.LayerNorm):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8).eval(),
        nn.BatchNorm2d(8),
        nn.GroupNorm(2, 8),
        nn.GroupNorm(1, 8),
        nn.InstanceNorm2d(8, affine=True),
        tl.GroupNorm1(8),
        nn.Linear(8, 8),
        nn.Linear(8, 1),
        nn.Linear(1, 8),
        nn.PReLU(8),
        tl.LayerScale(8),
        nn.Identity(),
        nn.Dropout(),
        nn.Embedding(8, 8),
        Gated(8),
        Widening(8),
        Residual(8),
        nn.LayerNorm((4, 8)),
        nn.Conv2d(8, 8, 1, groups=8),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_is_no_norm_is_refused_with_a_reason(module):
    with pytest.raises(NotANorm, match=r"\w+ \w+"):
        measure(module)


class ScalesItsInput(nn.Module):
    """An RMSNorm of (1 + w) x: it looks like a plain one as long as w is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        x = x * (1 + self.weight)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_what_a_norm_is_does_not_hang_on_its_present_values():
    with pytest.raises(NotANorm):
        measure(ScalesItsInput(8))
    silent = nn.LayerNorm(8)  # its output is constant today; it is a LayerNorm all the same
    nn.init.zeros_(silent.weight)
    assert measure(silent).centered and not measure(silent).weight.any()
