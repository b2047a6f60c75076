"""AutoNorm as one function, op by op and compiled, against the formula in float64; what it keeps, when it runs."""

import copy
import functools
import math
import shutil
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_autonorm import GateConfig
from hf_autonorm.errors import ConfigError
from hf_autonorm.nn import AutoNorm, fused, lean
from hf_autonorm.nn.functional import CURVES, EAGER
from tests.nn.test_autonorm import NORMS, make, sample

LAYOUTS = {
    "plain": lambda x: x,
    "every other token": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def op_by_op(monkeypatch):
    """As one function also where the input is small, and nothing compiled, unless a test says otherwise."""
    monkeypatch.setenv("HF_AUTONORM_FUSED", "0")


@pytest.fixture
def setting(monkeypatch):
    """setting("1") compiles what it can, in blocks of a few tokens; with "eager" Dynamo runs what it has traced."""

    def choose(value, backend="inductor"):
        monkeypatch.setenv("HF_AUTONORM_FUSED", value)
        monkeypatch.setattr(fused, "_engines", {})
        monkeypatch.setattr(fused, "_BLOCK", 64)
        if backend != "inductor":  # another knows none of Inductor's options
            compile = functools.partial(torch.compile, backend=backend)
            monkeypatch.setattr(fused.torch, "compile", lambda *args, options=None, **kwargs: compile(*args, **kwargs))

    torch._dynamo.reset()
    yield choose
    torch._dynamo.reset()


def formula(layer, p, x, exponential):
    """The paper's formula; p: the layer's parameters by name, x with its channels last, float64."""
    norm, gate = layer.original, layer.gate
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    centered = isinstance(norm, nn.LayerNorm) or "LayerNorm2d" in str(type(norm)) or "ConvNext" in str(type(norm))
    n = x - x.mean(-1, keepdim=True) if centered else x
    n = n / (n.square().mean(-1, keepdim=True) + eps).sqrt()
    one = 1.0 if "Gemma" in str(type(norm)) else 0.0
    f_x = n * (one + p["original.weight"]) if "original.weight" in p else n
    f_x = f_x + p.get("original.bias", 0)
    branch = layer.bias_branches[0]
    z = x * p["bias_branches.0.alpha"] * branch.alpha_scale.double() + p.get("bias_branches.0.shift", 0)
    curve = {"dyt": torch.tanh, "derf": torch.erf, "dyisru": lambda z: z / (1 + z * z).sqrt()}[layer.branch_names[0]]
    weight = p.get("bias_branches.0.weight", branch.weight.double())
    b_x = weight * curve(z) + p.get("bias_branches.0.bias", 0)
    if not layer.bias_gate.learns:
        w = torch.tensor([gate.value, 1 - gate.value]).double() if gate.kind == "fixed" else torch.full((2,), 0.5)
        if exponential is not None:
            w = exponential / exponential.sum(-1, keepdim=True)
    else:
        logits = p["bias_gate.bias_out"]
        if gate.granularity != "layer":
            rows = x.flatten(1, -2).mean(1) if gate.granularity == "sequence" and x.dim() > 2 else x
            hidden = torch.relu(rows @ p["bias_gate.weight_in"].t() + p["bias_gate.bias_in"])
            logits = hidden @ p["bias_gate.weight_out"].t() + logits
            if rows is not x:
                logits = logits.view(len(x), *[1] * (x.dim() - 2), 2)
        w = torch.softmax(logits if exponential is None else (logits - exponential.log()) / gate.tau, -1)
        if gate.kind == "hard":
            w = nn.functional.one_hot(w.argmax(-1), 2) + w - w.detach()
    strength = layer.scalar("strength")
    return (1 - strength * (1 - w[..., :1])) * f_x + strength * w[..., 1:] * b_x


def draw_noise(layer, x, seed):
    """The Exp(1) numbers that the layer draws for x (channels last), in float64."""
    if not layer.training or layer.gate.kind in ("softmax", "fixed") or layer.scalar("frozen"):
        return None
    lead = {"layer": (), "sequence": (len(x), *[1] * (x.dim() - 2))}.get(layer.gate.granularity, x.shape[:-1])
    torch.manual_seed(seed)
    return torch.empty(*lead, 2).exponential_().double()


def check(layer, x, seed=0):
    """Output and every gradient of `layer` at x against the formula in float64."""
    axis = layer.channel_axis
    x = x.detach().requires_grad_()
    tolerance = TOLERANCE[x.dtype]
    torch.manual_seed(seed)
    y = layer(x)
    generator = torch.Generator().manual_seed(seed)
    g = (torch.rand(y.shape, generator=generator) + 0.2).to(y.dtype)  # no sum of it cancels
    layer.zero_grad()
    y.backward(g)
    p = {name: t.detach().double().requires_grad_() for name, t in layer.named_parameters()}
    exact = x.detach().double().requires_grad_()
    rows = exact.movedim(axis, -1)
    expected = formula(layer, p, rows, draw_noise(layer, rows, seed)).movedim(-1, axis)
    expected.backward(g.double())
    assert y.dtype == x.dtype and y.shape == x.shape
    pairs = {"output": (y, expected), "x": (x.grad, exact.grad)}
    pairs |= {name: (t.grad, p[name].grad) for name, t in layer.named_parameters()}
    if layer.training and layer.scalar("frozen"):
        for name in [name for name in pairs if name.startswith("bias_gate")]:
            assert not pairs.pop(name)[0].any()
    for name, (found, reference) in pairs.items():
        if reference is None:
            assert found is None or not found.any(), name
            continue
        found, reference = found.detach().double(), reference.detach()
        assert (found - reference).norm() <= tolerance * reference.norm() + 1e-7, (name, found, reference)


def ran_lean(monkeypatch):
    """A list that grows by one with every call that ran as one function."""
    calls, run = [], lean._run
    monkeypatch.setattr(lean, "_run", lambda *args: calls.append(args) or run(*args))
    return calls


cases = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(sorted(NORMS)),
        "curve": st.sampled_from(sorted(CURVES)),
        "kind": st.sampled_from(["gumbel", "softmax", "hard", "random", "fixed"]),
        "granularity": st.sampled_from(["token", "sequence", "layer"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "strength": st.sampled_from([0.25, 1.0]),
        "shape": st.sampled_from([(2, 3), (1, 1), (5, 1), (2, 3, 2), (1, 7), (17, 3)]),
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "state": st.sampled_from(["train", "eval", "frozen"]),
        "seed": st.integers(0, 1000),
    }
)


def run(case):
    gate = {"kind": case["kind"], "granularity": case["granularity"]}
    layer = make(case["norm"], (case["curve"],), case["seed"], case["strength"], **gate).to(case["dtype"])
    layer.train(case["state"] != "eval")
    if case["state"] == "frozen":
        layer.freeze()
    x = LAYOUTS[case["layout"]](sample(case["norm"], case["shape"], case["seed"], case["dtype"]))
    check(layer, x, case["seed"])


@settings(max_examples=120)
@given(cases)
def test_op_by_op_equals_the_formula(case):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_AUTONORM_FUSED", "0")
        calls = ran_lean(patched)
        run(case)
    assert calls


@pytest.mark.parametrize("curve", sorted(CURVES))
@pytest.mark.parametrize("norm", ["layer_norm", "no_bias", "gemma", "channels_first"])
def test_traced_in_blocks_equals_the_formula(norm, curve, setting):
    setting("1", "eager")
    case = {"norm": norm, "curve": curve, "dtype": torch.float32, "strength": 0.7, "layout": "transposed"}
    for kind, granularity, shape in [
        ("gumbel", "token", (17, 3)),
        ("fixed", "layer", (2, 3)),
        ("hard", "token", (9, 5)),
    ]:
        run({**case, "kind": kind, "granularity": granularity, "shape": shape, "state": "train", "seed": 3})
    assert fused._engines and EAGER not in fused._engines.values()


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
@pytest.mark.parametrize(
    "norm, curve, dtype", [("layer_norm", "dyt", torch.float32), ("llama", "derf", torch.bfloat16)]
)
def test_compiled_equals_the_formula(norm, curve, dtype, setting):
    setting("1")
    case = {"norm": norm, "curve": curve, "dtype": dtype, "granularity": "token"}
    shapes = st.sampled_from([(1, 1), (2, 1), (3, 5), (17, 3), (0, 3), (64, 7)])

    @given(
        shapes, st.sampled_from([0.1, 0.6, 1.0]), st.sampled_from(["gumbel", "softmax", "fixed"]), st.integers(0, 99)
    )
    def many(shape, strength, kind, seed):
        if 0 in shape:
            layer = make(norm, (curve,)).to(dtype)
            assert layer(torch.zeros(*shape, layer.width, dtype=dtype)).shape == (*shape, layer.width)
            return
        run(
            {
                **case,
                "shape": shape,
                "strength": strength,
                "kind": kind,
                "seed": seed,
                "layout": "plain",
                "state": "train",
            }
        )

    many()
    assert fused._engines and EAGER not in fused._engines.values()


@pytest.mark.parametrize("norm", ["layer_norm", "no_bias", "gemma"])
def test_op_by_op_in_blocks_equals_the_formula(norm, setting, monkeypatch):
    setting("0")
    monkeypatch.setattr(fused, "_PLAIN_BLOCK", 8)
    monkeypatch.setattr(fused._IN_BLOCKS, "size", 64)
    case = {
        "norm": norm,
        "curve": "derf",
        "dtype": torch.float32,
        "strength": 0.7,
        "layout": "plain",
        "state": "train",
    }
    for kind, granularity, shape in [
        ("gumbel", "token", (17, 3)),
        ("fixed", "layer", (2, 3)),
        ("hard", "token", (9, 5)),
    ]:
        run({**case, "kind": kind, "granularity": granularity, "shape": shape, "seed": 3})


def test_one_compilation_for_all_sizes_strengths_gates_and_phases(setting):
    setting("1", "eager")
    layer = make()
    layer(sample(shape=(4, 5))).sum().backward()
    count = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]  # noqa: E731
    before = count()
    for strength in (0.1, 0.5, 1.0):
        for tokens in (2, 7, 40, 333):
            for other in (layer, make(kind="fixed", value=0.5), make(granularity="layer"), make(kind="hard")):
                other.set_scalar("strength", strength)
                other.train(tokens % 2 == 0)
                other(sample(shape=(tokens, 3))).sum().backward()
    layer.freeze()
    with torch.no_grad():
        layer(sample(shape=(6, 5)))
    assert count() == before
    with torch.inference_mode():
        for tokens in (3, 9, 30):
            layer(sample(shape=(tokens, 3)))
    assert count() <= before + 1


@pytest.mark.parametrize("kind", ["softmax", "gumbel", "random", "fixed"])
@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
@pytest.mark.parametrize("norm, curve", [("layer_norm", "dyt"), ("rms_norm", "derf"), ("channels_first", "dyisru")])
def test_first_and_second_derivatives_against_differences(norm, curve, kind, granularity, monkeypatch):
    layer = make(norm, (curve,), 1, 0.6, kind=kind, granularity=granularity).double().train()
    calls = ran_lean(monkeypatch)
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *parameters):
        torch.manual_seed(0)
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

    inputs = (sample(norm, (2, 2), 2, torch.float64).requires_grad_(), *layer.parameters())
    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)
    assert calls


def test_a_second_derivative_stops_at_the_layer():
    """A layer applied twice: its second input hangs on its own parameters."""
    layer = make(kind="softmax").double().eval()
    x = sample(dtype=torch.float64).requires_grad_()
    found = []
    for hooked in (False, True):
        if hooked:
            layer.original.register_forward_hook(lambda *args: None)  # the general path
        y = layer(layer(x)).square().sum()
        (grad,) = torch.autograd.grad(y, layer.original.weight, create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["gumbel", "hard", "softmax", "fixed", "alone"])
def test_keeps_x_the_statistics_and_the_gate(kind):
    width, tokens = 256, 512
    gate = GateConfig(kind="fixed", value=0.0 if kind == "alone" else 0.5) if kind in ("fixed", "alone") else None
    layer = AutoNorm(nn.LayerNorm(width), gate=gate or GateConfig(kind=kind)).train()
    x = torch.randn(tokens, width, requires_grad=True)
    saved = {}
    own = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters(), *layer.buffers())}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    y.sum().backward()
    # Per token, in fp32: mean, 1/σ, hidden units, 2 weights, 2 noises, and log p once more.
    numbers = {"alone": 0, "fixed": 2}.get(kind, 2 + 16 + 6)
    assert sum(saved.values()) <= 4 * tokens * numbers + 64


def test_transformed_functions_take_the_general_path(monkeypatch):
    layer, x = make(kind="softmax").eval(), sample(shape=(4,))
    calls = ran_lean(monkeypatch)
    loss = lambda x: layer(x).square().sum()  # noqa: E731
    (expected,) = torch.autograd.grad(loss(y := x.clone().requires_grad_()), y)
    assert len(calls) == 1
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (x,))[1], (expected * x).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, (expected * x).sum())
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["hook", "gate hook", "forward", "eps", "dtype", "autocast"])
def test_what_the_formula_does_not_know_is_not_passed_over(change, monkeypatch):
    """A hook is called, an own forward runs, another ε counts, a mixture of dtypes is the norm's business."""
    layer, x = make(kind="softmax").eval(), sample()
    calls, seen = ran_lean(monkeypatch), []
    before = layer(x)
    if change == "hook":
        layer.original.register_forward_hook(lambda *args: seen.append(1))
    elif change == "gate hook":
        layer.bias_gate.register_forward_hook(lambda *args: seen.append(1))
    elif change == "forward":
        layer.original.forward = lambda x: seen.append(1) or x
    elif change == "eps":
        layer.eps = 100.0
        assert not torch.allclose(layer(x), before)
        return
    elif change == "dtype":
        y = layer(x.bfloat16())
        assert len(calls) == 1 and y.dtype == layer.original(x.bfloat16()).dtype
        torch.testing.assert_close(y.float(), before, rtol=0.05, atol=0.05)
        return
    else:
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer(x), before)
            assert layer(x.bfloat16()).dtype == layer.original(x.bfloat16()).dtype
        return
    y = layer(x)
    assert len(calls) == 1 and seen
    if change != "forward":
        torch.testing.assert_close(y, before)


def test_the_result_may_be_changed_in_place():
    for norm in sorted(NORMS):
        layer, x = make(norm).train(), sample(norm, (2, 3)).requires_grad_()
        layer(x).add_(1).relu_().sum().backward()
        assert x.grad.isfinite().all()


def test_a_gradient_under_autocast():
    layer, x = make().train(), sample().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert x.grad.dtype == torch.float32 and layer.bias_gate.weight_in.grad.isfinite().all()


# --- the choice ------------------------------------------------------------------------------------------------------


def test_the_variable_comes_before_the_field_and_a_wrong_value_is_named(monkeypatch):
    monkeypatch.delenv("HF_AUTONORM_FUSED", raising=False)
    assert [fused.fused_mode(value) for value in fused.FUSED] == list(fused.FUSED)
    for value, mode in {"1": "on", "0": "off", "auto": "auto", "ON": "on"}.items():
        monkeypatch.setenv("HF_AUTONORM_FUSED", value)
        assert fused.fused_mode("off") == mode
    monkeypatch.setenv("HF_AUTONORM_FUSED", "yes")
    with pytest.raises(ConfigError, match="HF_AUTONORM_FUSED='yes'"):
        fused.fused_mode("auto")


def test_automatic_choice_hangs_on_the_size_alone(monkeypatch):
    monkeypatch.delenv("HF_AUTONORM_FUSED", raising=False)
    asked = []
    monkeypatch.setattr(fused, "_compile", lambda *args: asked.append(1) or EAGER)
    monkeypatch.setattr(fused, "_engines", {})
    monkeypatch.setattr(fused, "_PAYS_FROM", {"cpu": 600})
    layer, calls = make(), ran_lean(monkeypatch)
    layer(torch.randn(99, 6))
    assert not asked and not calls
    for _ in range(3):
        layer(torch.randn(100, 6))
    assert len(asked) == 1
    off = make()
    off.fused = "off"
    off(torch.randn(1000, 6))
    assert len(asked) == 1


@pytest.mark.parametrize("missing", ["compiler", "success"])
def test_one_warning_and_the_same_result_where_nothing_can_be_compiled(missing, setting, monkeypatch):
    layer, x = make(kind="softmax").eval(), sample(shape=(4, 5))
    setting("0")
    expected = layer(x)
    setting("1")
    if missing == "compiler":
        monkeypatch.setattr(fused.shutil, "which", lambda name: None)
        fused._compiler.cache_clear()
    else:
        monkeypatch.setattr(fused.torch, "compile", lambda *args, **kwargs: 1 / 0)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler|division by zero"):
        assert torch.equal(layer(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer(x), expected)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
    fused._compiler.cache_clear()


def test_a_long_compilation_is_announced(setting, caplog, monkeypatch):
    setting("1", "eager")
    clock = iter([0.0, 12.0])
    monkeypatch.setattr(fused.time, "perf_counter", lambda: next(clock))
    make()(sample(shape=(4, 5)))
    assert "width 6 in 12 s" in caplog.text


def test_infinite_and_missing_numbers_are_those_of_the_curve(setting):
    setting("1", "eager")
    layer = make(kind="fixed", value=0.0).eval()
    x = torch.randn(4, 6)
    x[1, 0], x[1, 1], x[2, 3] = math.inf, -math.inf, math.nan
    y = layer(x)
    branch = layer.bias_branches[0]
    expected = branch(x)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert y[1].isfinite().all() and y[2].isnan().sum() == 1
