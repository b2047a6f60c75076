"""AffineLike and NormLike: their formula, their step, their ends, and what happens at the edge of the numbers."""

import copy
import math

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_autonorm.nn import AffineLike, NormLike

LAYERS = (AffineLike, NormLike)


def linear(kind: str, width: int, out: int, seed: int = 0, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    layer = Conv1D(out, width) if kind == "conv1d" else nn.Linear(width, out, bias=bias)
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


def parts(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(W x, b) in float64."""
    weight = layer.weight.double() if isinstance(layer, Conv1D) else layer.weight.double().t()
    return x.double() @ weight, 0.0 if layer.bias is None else layer.bias.double()


def reference(cls: type, layer: nn.Module, x: torch.Tensor, strength: float, gain: float) -> torch.Tensor:
    """The formula, in float64."""
    linear, bias = parts(layer, x)
    squares = x.double().square().sum(-1, keepdim=True)
    if cls is AffineLike and layer.bias is not None:
        return (linear + bias) / ((1 - strength) + strength * (squares + 1).sqrt() / gain)
    return linear / ((1 - strength) + strength * squares.sqrt() / gain) + bias


@given(
    cls=st.sampled_from(LAYERS),
    kind=st.sampled_from(["linear", "conv1d"]),
    bias=st.booleans(),
    width=st.integers(1, 9),
    out=st.integers(1, 9),
    lead=st.sampled_from([(), (3,), (2, 3), (2, 1, 4)]),
    strength=st.sampled_from([0.0, 0.25, 1.0]),
    gain=st.floats(0.1, 30),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_equals_the_formula(cls, kind, bias, width, out, lead, strength, gain, scale, seed):
    original = linear(kind, width, out, seed, bias).double()
    layer = cls(original, strength)
    layer.set_scalar("gain", gain)
    x = torch.randn(*lead, width, dtype=torch.float64) * scale
    expected = reference(cls, original, x, layer.strength.item(), layer.gain.item())
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_strength_zero_is_the_original_bit_for_bit(cls, dtype):
    original = linear("linear", 8, 5).to(dtype)
    plain = copy.deepcopy(original)
    layer = cls(original, strength=0.0)
    for scale in (0.0, 1e-30, 1.0, 1e4):
        x = (torch.randn(4, 8) * scale).to(dtype).requires_grad_()
        y = x.detach().clone().requires_grad_()
        ours, theirs = layer(x), plain(y)
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        ours.float().sum().backward()
        theirs.float().sum().backward()
        assert torch.equal(x.grad, y.grad) and torch.equal(original.weight.grad, plain.weight.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain(x))


@given(
    cls=st.sampled_from(["affine", *LAYERS]),
    width=st.integers(2, 20),
    scale=st.floats(0.1, 10),
    seed=st.integers(0, 99),
)
def test_one_sgd_step_moves_the_activation_by_the_papers_factor(cls, width, scale, seed):
    """An affine layer moves by −η(‖x‖² + 1)δ, affine-like by −ηδ, norm-like by −2ηδ."""
    original = linear("linear", width, 4, seed).double()
    layer = original if cls == "affine" else cls(original)
    x, delta, lr = scale * torch.randn(width, dtype=torch.float64), torch.randn(4, dtype=torch.float64), 0.1
    before = layer(x)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    (before * delta).sum().backward()
    optimizer.step()
    factor = {"affine": x.square().sum().item() + 1, AffineLike: 1.0, NormLike: 2.0}[cls]
    torch.testing.assert_close(layer(x) - before, -lr * factor * delta, rtol=1e-6, atol=1e-9)


def test_without_a_bias_the_two_are_the_same_and_a_step_is_one():
    original = linear("linear", 6, 3, bias=False).double()
    x, delta = torch.randn(6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    assert torch.equal(AffineLike(original)(x), NormLike(original)(x))
    layer = AffineLike(original)
    before = layer(x)
    (before * delta).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    torch.testing.assert_close(layer(x) - before, -0.1 * delta, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_gradients_are_right(cls, strength):
    layer = cls(linear("linear", 5, 3).double(), strength)
    x = torch.randn(3, 5, dtype=torch.float64)
    # Norm-like at full strength has no derivative at zero; the next test says what it gives there.
    if cls is AffineLike or strength < 1:
        x[1] = 0
    assert torch.autograd.gradcheck(layer, x.requires_grad_())
    if cls is NormLike:
        x = x.detach()[[0, 2]].requires_grad_()  # ‖x‖ has no second derivative at zero
    assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-40, 5e-324])
def test_zero_and_tiny_inputs_give_finite_values_and_gradients(cls, bias, dtype, tiny):
    layer = cls(linear("linear", 4, 3, bias=bias).to(dtype))
    x = torch.full((2, 4), tiny, dtype=dtype)
    x[1] = 1.0
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == dtype and y.isfinite().all()
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad.isfinite().all()
    if x[0].detach().any():
        return
    torch.testing.assert_close(y[0], layer.bias if bias else torch.zeros(3, dtype=dtype))
    torch.testing.assert_close(grad[0], layer.weight.sum(0))
    (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    assert second.isfinite().all()


def test_a_tiny_input_still_has_a_direction():
    """‖x‖² underflows in fp32 here; the bias, 10³⁰ times larger than W x, must not drown it."""
    layer = NormLike(linear("linear", 4, 3))
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x * 1e-30), layer(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x * 1e25), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.01, 20.0, 300.0])
def test_half_precision_neither_overflows_nor_loses_the_one(cls, dtype, value):
    torch.manual_seed(0)
    layer = cls(nn.Linear(1024, 16))
    x = torch.full((1, 1024), value)
    expected = reference(cls, layer.original, x, 1.0, 1.0).float()
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype and layer.gain.dtype == torch.float32
    assert (y.float() - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("cls", LAYERS)
def test_the_plus_one_counts_in_bfloat16(cls):
    """‖x‖² = 400: 401 is no bfloat16 number."""
    layer = cls(nn.Linear(1, 1)).bfloat16()
    layer.weight.data.fill_(1), layer.bias.data.zero_()
    y = layer(torch.tensor([[20.0]], dtype=torch.bfloat16))
    expected = 20 / math.sqrt(401) if cls is AffineLike else 1.0
    assert y.item() == torch.tensor(expected).bfloat16().item()


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("training", [True, False])
def test_nan_stays_in_its_row(cls, strength, bad, training):
    layer = cls(linear("linear", 6, 3), strength).train(training)
    x = torch.randn(4, 6)
    clean = layer(x)
    x[2, 1] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])
    if math.isnan(bad) or strength > 0:
        assert y[2].isnan().all()


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtype_of_the_original(cls, dtype):
    layer = cls(linear("linear", 6, 3).to(dtype))
    x = torch.randn(2, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == layer.original(x).dtype
        torch.testing.assert_close(
            layer(x).float(), reference(cls, layer.original, x, 1, 1).float(), rtol=0.05, atol=0.05
        )


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_is_one_graph_under_compile_and_export(cls, strength):
    layer = cls(linear("linear", 6, 3), strength)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (5, 7, 9):
        x = torch.randn(2, length, 6)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count <= 2
    if strength == 0.5:  # another value of the same phase costs no compilation
        layer.set_scalar("strength", 0.7)
        layer.set_scalar("gain", 3.0)
        torch.testing.assert_close(compiled(x), layer(x))
        assert counter.frame_count <= 2
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


def test_an_in_place_change_of_the_output_is_allowed_and_the_input_is_kept():
    layer = AffineLike(linear("linear", 6, 3))
    x = torch.randn(2, 6, requires_grad=True)
    kept = x.detach().clone()
    layer(x).relu_().sum().backward()
    with torch.no_grad():
        layer(x)
    assert torch.equal(x, kept) and x.grad.isfinite().all()


@pytest.mark.parametrize("cls", LAYERS)
def test_no_grad_gives_the_same_and_a_hook_sees_the_original_output(cls):
    layer = cls(linear("linear", 6, 3))
    x = torch.randn(2, 6)
    expected, seen = layer(x), []
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        handle = layer.original.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        layer(x)
        handle.remove()
    torch.testing.assert_close(seen[0][1], layer.original(seen[0][0]))


@pytest.mark.parametrize("cls", LAYERS)
def test_adds_no_parameter_and_shows_the_original(cls):
    layer = cls(linear("linear", 6, 3))
    assert layer.new_parameters() == [] and layer.gain.shape == layer.strength.shape == (1,)
    assert layer.weight is layer.original.weight and layer.in_features == 6
    assert set(layer.state_dict()) == {"strength", "gain", "original.weight", "original.bias"}
    assert "gain=1" in repr(layer)
    copied = copy.deepcopy(layer)
    layer.set_scalar("gain", 2.0)
    copied.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(copied(x), layer(x))


def test_vmap_gives_per_sample_gradients():
    layer = AffineLike(linear("linear", 6, 3))
    x = torch.randn(4, 6)
    parameters = dict(layer.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(layer, parameters, (sample,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(4):
        one = torch.autograd.grad(layer(x[i]).square().sum(), layer.original.weight)[0]
        torch.testing.assert_close(each["original.weight"][i], one)


@given(
    cls=st.sampled_from(LAYERS),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.sampled_from([(7,), (1, 7), (3, 7), (2, 3, 7), (0, 7)]),
    strength=st.sampled_from([0.25, 1.0]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_output_and_gradients_against_float64(cls, bias, dtype, shape, strength, transposed, seed):
    original = linear("linear", 7, 5, seed, bias).to(dtype)
    layer, exact = cls(original, strength), copy.deepcopy(original).double()
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if transposed else x
    x.requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape).to(dtype)
    y.backward(g)
    wide = x.detach().double().requires_grad_()
    squares = wide.square().sum(-1, keepdim=True)
    constant = cls is AffineLike and bias
    d = (1 - strength) + strength * (squares + constant).sqrt()
    expected = exact(wide) / d if constant else (wide @ exact.weight.t()) / d + (exact.bias if bias else 0)
    expected.backward(g.double())
    pairs = {"output": (y, expected), "x": (x.grad, wide.grad)}
    pairs |= {name: (p.grad, exact.get_parameter(name).grad) for name, p in original.named_parameters()}
    for name, (found, reference) in pairs.items():
        bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert (found.double() - reference).norm() <= bound * reference.norm() + 1e-6, name


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_keeps_no_more_than_the_linear_layer(cls, bias):
    layer = cls(linear("linear", 64, 48, bias=bias))
    x = torch.randn(32, 64, requires_grad=True)
    own = {t.data_ptr() for t in (x, *layer.parameters())}
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.data_ptr(): t.numel() * t.element_size()}) or t, lambda t: t
    ):
        y = layer(x)
    y.sum().backward()
    assert sum(size for pointer, size in saved.items() if pointer not in own) <= 8 * len(x)
