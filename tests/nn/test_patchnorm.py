"""PatchNorm: every kind of convolution against an unfolded reference."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hf_autonorm.errors import ConfigError, UnsupportedError
from hf_autonorm.nn import PatchNorm

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FORMS = ("affine_like", "norm_like")


def reference(conv: nn.Module, x: torch.Tensor, form: str, strength: float = 1.0, gain: float = 1.0) -> torch.Tensor:
    """The formula from the patches themselves: each output is one patch times one filter."""
    spatial = len(conv.kernel_size)
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        mode = {"zeros": "constant"}.get(conv.padding_mode, conv.padding_mode)
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    else:
        x = F.pad(x, [p for size in reversed(conv.padding) for p in (size, size)])
    patches = x
    for axis, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation)):
        patches = patches.unfold(2 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    patches = patches.unflatten(1, (conv.groups, -1))  # batch, group, channel, positions…, kernel…
    weight = conv.weight.unflatten(0, (conv.groups, -1))  # group, out, channel, kernel…
    p, k = "xyz"[:spatial], "ijk"[:spatial]
    linear = torch.einsum(f"bgc{p}{k},goc{k}->bgo{p}", patches, weight).flatten(1, 2)
    squares = torch.einsum(f"bgc{p}{k},bgc{p}{k}->bg{p}", patches, patches)
    squares = squares.repeat_interleave(conv.out_channels // conv.groups, 1)
    bias = 0 if conv.bias is None else conv.bias.view(-1, *[1] * spatial)
    if form == "affine_like" and conv.bias is not None:
        return (linear + bias) / ((1 - strength) + strength * (squares + 1).sqrt() / gain)
    d = (1 - strength) + strength * squares.sqrt() / gain
    return linear / torch.where(d == 0, 1, d) + bias  # a patch of padding alone


@given(
    spatial=st.sampled_from([1, 2, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 3),
    second_kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    strength=st.sampled_from([0.5, 1.0]),
    hooked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_patches_one_by_one(
    spatial, groups, kernel, second_kernel, stride, dilation, padding, mode, bias, form, strength, hooked, seed
):
    assume(padding != "same" or stride == 1)
    torch.manual_seed(seed)
    size = (kernel, *[second_kernel] * (spatial - 1))
    conv = CONVS[spatial](
        4, 8, size, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias, padding_mode=mode
    ).double()
    layer = PatchNorm(conv, form, strength)
    layer.set_scalar("gain", 2.0)
    x = torch.randn(2, 4, *(9, 7, 6)[:spatial], dtype=torch.float64)
    expected = reference(conv, x, form, layer.strength.item(), 2.0)
    if hooked:  # the original must be called then
        conv.register_forward_hook(lambda *args: None)
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer(x[0]), expected[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_rank_layout_and_empty_batches_are_those_of_the_convolution(form, groups, strength):
    conv = nn.Conv2d(4, 8, 3, groups=groups)
    layer = PatchNorm(conv, form, strength)
    x = torch.randn(2, 4, 9, 9)
    for value in (x, x[0], x[:0], x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                ours, theirs = layer(value), conv(value)
            assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
    layer.to(memory_format=torch.channels_last)
    assert layer(x).stride() == conv(x).stride()
    if strength == 0:
        assert torch.equal(layer(x), conv(x))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_right_also_where_pixels_are_zero(form):
    layer = PatchNorm(nn.Conv2d(2, 3, 2).double(), form)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    x[..., 1, 1] = 0
    assert torch.autograd.gradcheck(layer, x.requires_grad_())
    assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-40])
@pytest.mark.parametrize("hooked", [False, True])
def test_zero_patches_give_the_bias_and_finite_gradients(form, dtype, tiny, hooked):
    conv = nn.Conv2d(2, 3, 2, stride=2).to(dtype)
    if hooked:
        conv.register_forward_hook(lambda *args: None)
    layer = PatchNorm(conv, form)
    x = torch.zeros(1, 2, 4, 4, dtype=dtype)
    x[..., :2, :2], x[..., 2:, 2:] = tiny, 1.0
    x.requires_grad_()
    y = layer(x)
    assert y.isfinite().all() and y.dtype == dtype
    torch.testing.assert_close(y[0, :, 0, 1], layer.bias)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad.isfinite().all()
    torch.testing.assert_close(grad[0, :, :2, 2:], layer.weight.sum(0))
    if tiny == 0:
        (second,) = torch.autograd.grad(grad.float().square().sum(), x)
        assert second.isfinite().all()


def test_a_tiny_patch_still_has_a_direction():
    layer, x = PatchNorm(nn.Conv2d(2, 3, 3), "norm_like"), torch.randn(2, 2, 5, 5)
    torch.testing.assert_close(layer(x * 1e-28), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.01, 20.0, 300.0])
def test_half_precision_does_not_overflow(form, dtype, value):
    torch.manual_seed(0)
    layer = PatchNorm(nn.Conv2d(128, 4, 3), form)
    x = torch.full((1, 128, 4, 4), value)
    expected = layer(x)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype and (y.float() - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_autocast_gives_the_dtype_of_the_original(form):
    layer = PatchNorm(nn.Conv2d(4, 8, 3, groups=2), form)
    x = torch.randn(2, 4, 6, 6)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == layer.original(x).dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_reaches_only_the_patches_that_hold_it(form, bad):
    layer = PatchNorm(nn.Conv2d(3, 4, 3), form)
    x = torch.randn(2, 3, 9, 9)
    clean = layer(x)
    x[0, 1, 1, 1] = bad
    y = layer(x)
    assert y[0, :, :2, :2].isnan().all()
    assert torch.equal(y[1], clean[1])
    torch.testing.assert_close(y[0, :, 2:, 2:], clean[0, :, 2:, 2:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_is_one_graph_under_compile_and_export(form, strength):
    layer = PatchNorm(nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular", groups=2), form, strength)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(2, 4, 9, 9)
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(torch.export.export(layer.eval(), (x,)).module()(x), layer(x))


def test_relu_in_place_after_it():
    net = nn.Sequential(PatchNorm(nn.Conv2d(3, 4, 3)), nn.ReLU(inplace=True))
    net(torch.randn(2, 3, 5, 5)).sum().backward()
    assert net[0].weight.grad.isfinite().all()


def test_what_it_does_not_wrap_is_named():
    with pytest.raises(UnsupportedError, match="ConvTranspose2d"):
        PatchNorm(nn.ConvTranspose2d(3, 4, 3))
    with pytest.raises(ConfigError, match="affine"):
        PatchNorm(nn.Conv2d(3, 4, 3), "afine_like")
    assert "form=norm_like" in repr(PatchNorm(nn.Conv2d(3, 4, 3), "norm_like"))
