"""AutoNorm against the formula in float64, and what it leaves alone."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from timm.layers import LayerNorm2d
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_autonorm import GateConfig, gates
from hf_autonorm.errors import ConfigError
from hf_autonorm.nn import AffineLike, AutoNorm
from tests.models import same_bits

KINDS = ("gumbel", "softmax", "hard", "random", "fixed")
BRANCHES = ("dyt", "dyisru", "derf", "rms_norm", "adanorm", "film")
D = 6
NORMS = {
    "layer_norm": lambda: nn.LayerNorm(D),
    "no_bias": lambda: nn.LayerNorm(D, bias=False),
    "plain": lambda: nn.LayerNorm(D, elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(D, eps=1e-6),
    "t5": lambda: T5LayerNorm(D),
    "llama": lambda: LlamaRMSNorm(D),
    "gemma": lambda: GemmaRMSNorm(D),
    "channels_first": lambda: ConvNextLayerNorm(D, data_format="channels_first"),
    "channels_last": lambda: ConvNextLayerNorm(D),
    "layer_norm_2d": lambda: LayerNorm2d(D),
}
CHANNELS_FIRST = ("channels_first", "layer_norm_2d")


@torch.no_grad()
def make(norm="layer_norm", branches=("dyt",), seed=0, strength=1.0, **gate):
    """A layer as training might leave it: all its parameters perturbed."""
    generator = torch.Generator().manual_seed(seed)
    original = NORMS[norm]()
    for p in original.parameters():
        p.add_(0.3 * torch.randn(p.shape, generator=generator))
    if gate.get("kind") == "fixed":
        gate.setdefault("value", 0.3)
    layer = AutoNorm(original, branches, GateConfig(hidden=4, **gate), strength=strength, generator=generator)
    for p in layer.new_parameters():
        p.add_(0.3 * torch.randn(p.shape, generator=generator))
    for branch in layer.bias_branches:
        if branch.pointwise:
            branch.alpha_scale.fill_(0.8)
    return layer


def sample(norm="layer_norm", shape=(2, 3), seed=0, dtype=torch.float32):
    """x with leading axes `shape`; channels-first norms get (batch, D, …)."""
    x = 2 * torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    if norm in CHANNELS_FIRST:
        x = x.view(shape[0], -1, 1, D) if len(shape) < 3 else x
        x = x.movedim(-1, 1).contiguous()
    return x.to(dtype)


# --- the reference: plain formulas, channels last, float64


def reference(layer, x, f_x, seed):
    """The formula of the papers, written without any of the package's code. x and f_x have their channels last."""
    s = {name: t.double() for name, t in layer.state_dict().items()}
    gate = layer.gate

    def branch(index, name):
        p = {k.split(".", 2)[2]: v for k, v in s.items() if k.startswith(f"bias_branches.{index}.")}
        mean, square = x.mean(-1, keepdim=True), (x**2).mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        weight, bias = p.get("weight", 1), p.get("bias", 0)
        if name in ("dyt", "dyisru", "derf"):
            z = p["alpha"] * p["alpha_scale"] * x
            if name == "derf":
                z = z + p["shift"]
            curve = {"dyt": torch.tanh, "derf": torch.erf, "dyisru": lambda z: z / (1 + z**2).sqrt()}[name]
            return weight * curve(z) + bias
        if name == "rms_norm":
            return weight * x / (square + 1e-6).sqrt() + bias
        if name == "adanorm":
            y = (x - mean) / (variance + 1e-6).sqrt()
            return (1 - 0.1 * y) * y
        centered = isinstance(layer.original, (nn.LayerNorm, ConvNextLayerNorm))
        n = (x - mean) / (variance + 1e-6).sqrt() if centered else x / (square + 1e-6).sqrt()
        pooled = x.reshape(len(x), -1, D).mean(1).view(len(x), *[1] * (x.dim() - 2), D) if x.dim() > 2 else x
        delta = torch.relu(pooled @ p["weight_in"].T) @ p["weight_out"].T
        return (weight + delta[..., :D]) * n + bias + delta[..., D:]

    choices = len(layer.branch_names) + 1
    lead = {"token": x.shape[:-1], "layer": ()}.get(gate.granularity, (len(x), *[1] * (x.dim() - 2)))
    noisy = layer.training and not layer.scalar("frozen")
    torch.manual_seed(seed)
    log_p = None
    if gate.kind == "fixed":
        w = torch.tensor([gate.value] + [(1 - gate.value) / (choices - 1)] * (choices - 1), dtype=torch.float64)
    elif gate.kind == "random":
        w = torch.full((choices,), 1 / choices, dtype=torch.float64)
        if noisy:
            e = torch.empty(*lead, choices, dtype=torch.float64).exponential_()
            w = e / e.sum(-1, keepdim=True)
    else:
        logits = s["bias_gate.bias_out"]
        if gate.granularity != "layer":
            rows = x
            if gate.granularity == "sequence" and x.dim() > 2:
                rows = x.reshape(len(x), -1, D).mean(1).view(*lead, D)
            hidden = torch.relu(rows @ s["bias_gate.weight_in"].T + s["bias_gate.bias_in"])
            logits = hidden @ s["bias_gate.weight_out"].T + logits
        log_p = logits - logits.logsumexp(-1, keepdim=True)
        w = log_p.exp()
        if gate.kind in ("gumbel", "hard") and noisy:
            noise = -torch.log(torch.empty_like(logits).exponential_())
            w = torch.softmax((logits + noise) / gate.tau, -1)
        if gate.kind == "hard":
            w = F.one_hot(w.argmax(-1), choices).double()
    strength = layer.scalar("strength")
    total = (1 - strength * (1 - w[..., :1])) * f_x
    for index, name in enumerate(layer.branch_names):
        total = total + strength * w[..., index + 1 : index + 2] * branch(index, name)
    return total, log_p


cases = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(sorted(NORMS)),
        "kind": st.sampled_from(KINDS),
        "granularity": st.sampled_from(["token", "sequence", "layer"]),
        "branches": st.lists(st.sampled_from(BRANCHES), min_size=1, max_size=3, unique=True).map(tuple),
        "strength": st.sampled_from([1e-3, 0.25, 0.5, 1.0]),
        "shape": st.sampled_from([(2, 3), (1, 1), (3, 1), (2, 3, 2), (4, 2, 1)]),
        "training": st.booleans(),
        "frozen": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def run_case(case, dtype):
    case = dict(case)
    shape, training, frozen, norm = (case.pop(k) for k in ("shape", "training", "frozen", "norm"))
    seed, strength, branches = (case.pop(k) for k in ("seed", "strength", "branches"))
    layer = make(norm, branches, seed, strength, **case).train(training)
    layer = layer.to(dtype)
    if frozen:
        layer.freeze()
    x = sample(norm, shape, seed, dtype)
    torch.manual_seed(seed)
    y = layer(x)
    axis = 1 if norm in CHANNELS_FIRST else -1
    f_x = layer.original(x)
    expected, log_p = reference(layer, x.double().movedim(axis, -1), f_x.double().movedim(axis, -1), seed)
    return layer, y, expected.movedim(-1, axis), log_p


@given(cases)
@example(
    {
        "norm": "layer_norm",
        "kind": "fixed",
        "granularity": "token",
        "branches": ("film", "dyt"),
        "strength": 1.0,
        "shape": (2, 3),
        "training": True,
        "frozen": False,
        "seed": 0,
    }
)
def test_equals_the_formula_in_float64(case):
    _, y, expected, _ = run_case(case, torch.float64)
    # RMSNorms of transformers compute in float32 whatever comes in, which is why f(x) is taken as given.
    assert y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["layer_norm", "channels_first"])
@pytest.mark.parametrize("training", [True, False])
def test_every_gate_with_every_branch_equals_the_formula(norm, kind, granularity, training):
    case = {"norm": norm, "kind": kind, "granularity": granularity, "branches": BRANCHES, "strength": 0.7}
    _, y, expected, _ = run_case(
        {**case, "shape": (2, 3), "training": training, "frozen": False, "seed": 3}, torch.float64
    )
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gumbel", "softmax", "hard"])
@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
@pytest.mark.parametrize("branches", [("dyt",), ("dyt", "rms_norm")])
def test_statistics_are_mean_weights_and_entropy(kind, granularity, branches):
    case = {"norm": "layer_norm", "kind": kind, "granularity": granularity, "branches": branches, "strength": 1.0}
    layer, _, _, log_p = run_case(
        {**case, "shape": (4, 5), "training": True, "frozen": False, "seed": 5}, torch.float32
    )
    p = log_p.exp().reshape(-1, len(branches) + 1)
    entropy = -(p * p.log()).sum(-1).mean()
    torch.testing.assert_close(layer.statistics.double(), torch.cat([p.mean(0), entropy[None]]), rtol=1e-5, atol=1e-6)
    before = layer.statistics.clone()
    layer.eval()(100 * sample(shape=(4, 5)))
    assert torch.equal(layer.statistics, before)  # eval forwards do not count
    layer.train()(torch.zeros(0, 5, D))
    layer(torch.zeros(2, 0, D))
    assert torch.equal(layer.statistics, before)  # nor do empty ones


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
@pytest.mark.parametrize("kind", ["gumbel", "softmax", "random", "fixed"])
@pytest.mark.parametrize("norm", ["layer_norm", "channels_first"])
def test_gradients_against_differences_in_float64(norm, kind, granularity):
    layer = make(norm, ("dyt", "dyisru", "derf", "rms_norm", "film"), 1, 0.6, kind=kind, granularity=granularity)
    layer = layer.double().train()
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *parameters):
        torch.manual_seed(0)
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

    x = sample(norm, (2, 2), 2, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(f, (x, *layer.parameters()), fast_mode=True)


def test_gradient_of_the_hard_gate_is_that_of_the_soft_sample():
    """Straight-through: forward is one-hot, backward is dL/dw_k = Σ_d g_d b_k, through the soft weights."""
    hard = make(branches=("dyt", "rms_norm"), kind="hard").train()
    soft = make(branches=("dyt", "rms_norm"), kind="gumbel").train()
    x, g = sample(shape=(4, 5)), torch.randn(4, 5, D)
    torch.manual_seed(3)
    hard(x).backward(g)
    torch.manual_seed(3)
    soft(x).backward(g)
    for name, p in soft.bias_gate.named_parameters():
        torch.testing.assert_close(dict(hard.bias_gate.named_parameters())[name].grad, p.grad)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_no_parameter_is_left_without_a_gradient(norm, kind, strength):
    layer = make(norm, BRANCHES, strength=strength, kind=kind, **({"value": 0.0} if kind == "fixed" else {})).train()
    layer(sample(norm, (3, 4))).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if strength > 0 and kind != "hard":  # and the branches learn (a hard gate passes by those it did not draw)
        assert all(p.grad.any() for branch in layer.bias_branches for p in branch.parameters())
    if strength > 0 and kind in ("gumbel", "softmax", "hard"):
        assert all(p.grad.any() for p in layer.bias_gate.parameters())


# --- strength --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_strength_zero_is_the_original_bit_for_bit(norm, training, dtype, autocast):
    layer = make(norm, BRANCHES, strength=0.0).to(dtype).train(training)
    plain = copy.deepcopy(layer.original)
    xs = [sample(norm, (3, 4), dtype=dtype).requires_grad_() for _ in range(2)]
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y, expected = layer(xs[0]), plain(xs[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(y, expected) and y.stride() == expected.stride()
    weight = torch.randn_like(y)
    y.backward(weight), expected.backward(weight)
    assert same_bits(xs[0].grad, xs[1].grad)
    for p, q in zip(layer.original.parameters(), plain.parameters()):
        assert same_bits(p.grad, q.grad)
    if training:
        assert all(p.grad is not None and not p.grad.any() for p in layer.new_parameters())


@given(cases, st.floats(0.01, 0.99))
def test_strength_between_is_a_straight_line(case, strength):
    outputs = {}
    for value in (0.0, 1.0, strength):
        outputs[value] = run_case({**case, "strength": value}, torch.float64)[1].double()
    line = (1 - strength) * outputs[0.0] + strength * outputs[1.0]
    torch.testing.assert_close(outputs[strength], line, rtol=1e-6, atol=1e-6)


@given(st.floats(0.01, 0.99), st.sampled_from(["token", "sequence", "layer"]), st.integers(1, 4))
def test_starts_at_the_given_norm_weight(start, granularity, branches):
    layer = AutoNorm(nn.LayerNorm(D), BRANCHES[:branches], GateConfig(init_norm_weight=start, granularity=granularity))
    weights, _ = layer.eval().bias_gate(sample(shape=(3, 4)))
    expected = torch.tensor([start] + [(1 - start) / branches] * branches)
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.statistics[:-1], expected, rtol=1e-5, atol=1e-6)


# --- dtype, layout, shape --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, None])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_dtype_is_the_originals_whatever_the_gate(norm, value, dtype, x_dtype, autocast):
    gate = {"kind": "gumbel"} if value is None else {"kind": "fixed", "value": value}
    layer = make(norm, **gate).to(dtype)
    x = sample(norm, dtype=x_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        try:
            expected = layer.original(x)
        except RuntimeError:
            pytest.skip("the original takes no such mixture of dtypes")
        assert layer.train()(x).dtype == layer.eval()(x).dtype == expected.dtype


def layouts(norm):
    """x in every memory layout that models make."""
    if norm in CHANNELS_FIRST:
        x = torch.randn(2, D, 3, 5)
        yield from (
            x,
            x.contiguous(memory_format=torch.channels_last),
            x.transpose(2, 3),
            torch.randn(4, D, 3, 5)[::2],
        )
        yield torch.randn(2, D, 1, 1), torch.randn(1, D, 3, 5).expand(2, -1, -1, -1)
    else:
        x = torch.randn(2, 3, D)
        yield from (
            x,
            torch.randn(3, 2, D).transpose(0, 1),
            torch.randn(2, D, 3).transpose(1, 2),
            torch.randn(4, 3, D)[::2],
        )
        yield from (
            torch.randn(1, 3, D).expand(2, -1, -1),
            torch.randn(2, 3, 2 * D)[..., ::2],
            torch.randn(2, 4, D)[:, 1:],
        )
        yield from (torch.randn(3, D), torch.randn(D, 3).t())


def strides(x):
    """Those that say something: an axis of length 1 has none."""
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


@pytest.mark.parametrize("value", [0.0, 0.5, None])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_memory_layout_is_the_originals(norm, value):
    layer = make(norm, **({"kind": "softmax"} if value is None else {"kind": "fixed", "value": value}))
    for x in layouts(norm):
        for one in x if isinstance(x, tuple) else (x,):
            y, expected = layer(one), layer.original(one)
            assert y.shape == expected.shape and strides(y) == strides(expected), (one.shape, one.stride())
            contiguous = layer(one.contiguous())
            torch.testing.assert_close(y, contiguous, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("granularity", ["token", "sequence", "layer"])
@pytest.mark.parametrize("training", [True, False])
def test_zero_tokens(granularity, training):
    for shape in ((0, 3, D), (2, 0, D), (0, D)):
        layer = make(branches=BRANCHES, granularity=granularity).train(training)
        x = torch.zeros(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == shape
        y.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert make(kind="fixed", value=0.0)(torch.zeros(0, 3, D)).shape == (0, 3, D)


def test_takes_the_originals_keyword_and_no_other():
    layer = make("llama")
    x = sample()
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(hidden_states=x), y)
    with pytest.raises(TypeError):
        layer(input=x)
    with pytest.raises(TypeError, match="takes one tensor"):
        layer(x, scale=2.0)
    with pytest.raises(TypeError, match="takes one tensor"):
        layer()


def test_shows_the_originals_data_and_assigns_to_it():
    layer = make()
    original = layer.original
    assert layer.weight is original.weight and layer.bias is original.bias
    assert layer.eps == original.eps and layer.normalized_shape == original.normalized_shape
    new = nn.Parameter(torch.full((D,), 3.0))
    layer.weight = new
    assert original.weight is new and "weight" not in layer._parameters
    with pytest.raises(AttributeError):
        _ = layer.nothing_like_it
    with pytest.raises(AttributeError, match="data only"):
        layer.original.method = lambda: None
        _ = layer.method


# --- scalars and state -----------------------------------------------------------------------------------------------

CONVERSIONS = [
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.double(),
    lambda m: m.float(),
    lambda m: m.half().float(),
    lambda m: m.to(torch.float16),
    lambda m: m.to("cpu", torch.bfloat16),
    lambda m: m.to(torch.randn(1).double()),
]


@given(st.lists(st.sampled_from(CONVERSIONS), max_size=3), st.floats(0, 1), st.booleans())
def test_scalars_stay_float32_and_keep_their_value(conversions, strength, frozen):
    layer = make(strength=strength)
    layer.set_scalar("frozen", float(frozen))
    layer.r2.fill_(0.123456789)
    expected = {name: layer.get_buffer(name).clone() for name in ("strength", "frozen", "r2", "statistics")}
    model = nn.Sequential(layer)
    for convert in conversions:
        model = convert(model)
    for name, value in expected.items():
        assert same_bits(layer.get_buffer(name), value)
    assert layer.scalar("strength") == expected["strength"].item() and layer.scalar("frozen") == float(frozen)
    assert all(b.ndim >= 1 and b.dtype != torch.bool for b in layer.buffers())
    assert all(p.ndim >= 1 for p in layer.parameters())


def snapshot(layer):
    """Everything in the module that is no tensor, and the identity of every tensor."""
    tables = {
        name: {k: id(v) for k, v in layer.__dict__[name].items()} for name in ("_parameters", "_buffers", "_modules")
    }
    rest = {k: copy.copy(v) for k, v in vars(layer).items() if k not in tables and k != "_seen"}
    return tables, rest, {k: (id(t), version) for k, (t, version) in layer._seen.items()}


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_forward_changes_no_python_attribute(granularity, strength):
    layer = make(strength=strength, granularity=granularity)
    modules = list(layer.modules())
    before = [snapshot(layer), *[{k: id(v) for k, v in vars(m).items()} for m in modules[1:]]]
    for training in (True, False):
        layer.train(training)
        before[0] = snapshot(layer)
        before[1:] = [{k: id(v) for k, v in vars(m).items()} for m in modules[1:]]
        layer(sample()).sum().backward()
        assert snapshot(layer) == before[0]
        assert [{k: id(v) for k, v in vars(m).items()} for m in modules[1:]] == before[1:]
    replica = copy.copy(layer)  # as DataParallel makes them: its forward must not reach back
    replica(sample())
    assert snapshot(layer) == before[0]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict"])
@pytest.mark.parametrize("strength", [0.0, 0.25, 1.0])
def test_copies_are_equal_and_independent(how, strength):
    layer = make(branches=("dyt", "film"), strength=strength).train()
    layer.freeze()
    layer.r2.fill_(0.5)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = make(branches=("dyt", "film"), seed=9).train()
        other.load_state_dict(layer.state_dict())
    assert other.scalar("strength") == strength and other.scalar("frozen") == 1
    x = sample()
    assert same_bits(layer(x), other(x)) and same_bits(layer.eval()(x), other.eval()(x))
    for name, t in layer.state_dict().items():
        assert same_bits(t, other.state_dict()[name]) and t.data_ptr() != other.state_dict()[name].data_ptr()
    other.set_scalar("strength", 0.75)
    other.unfreeze()
    assert layer.scalar("strength") == strength and layer.scalar("frozen") == 1
    repr(other)


def test_load_with_assign_and_writes_to_buffers_are_seen():
    layer, x = make(strength=1.0), sample()
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    state["strength"].zero_()
    layer.load_state_dict(state, assign=True)
    assert same_bits(layer(x), layer.original(x))
    layer.strength.fill_(1.0)
    assert layer.scalar("strength") == 1 and not torch.equal(layer(x), layer.original(x))
    layer.strength = torch.zeros(1)
    assert same_bits(layer(x), layer.original(x))
    layer.strength.data.fill_(1.0)  # a write that autograd's version counter does not see
    layer.load_state_dict(layer.state_dict())
    assert layer.scalar("strength") == 1


# --- averages of weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("layer", [lambda: make(strength=0.3), lambda: AffineLike(nn.Linear(D, D), 0.3)])
def test_an_average_of_equal_layers_is_that_layer(layer, use_buffers):
    layer, x = layer().eval(), sample()
    average = AveragedModel(layer, use_buffers=use_buffers)
    for _ in range(3):
        average.update_parameters(layer)
    assert all(same_bits(t, average.module.state_dict()[k]) for k, t in layer.state_dict().items())
    assert torch.equal(average(x), layer(x)) and average.module.scalar("strength") == layer.scalar("strength")


@pytest.mark.parametrize("multi", [None, get_ema_multi_avg_fn(0.5)])
def test_an_average_over_a_ramp_and_a_freeze_is_seen(multi):
    """With `use_buffers` the strength is averaged like a weight; a gate frozen on the way counts as frozen."""
    layer, x = make(strength=0.0).eval(), sample()
    average = AveragedModel(layer, multi_avg_fn=multi, use_buffers=True)
    for strength in (0.0, 1.0):
        layer.set_scalar("strength", strength)
        if strength:
            layer.freeze()
        average.update_parameters(layer)
    mean = average.module
    assert mean.scalar("strength") == mean.strength.item() == 0.5 and mean.scalar("frozen") > 0
    reference = make(strength=0.5).eval()
    torch.testing.assert_close(mean(x), reference(x))
    mean.train()
    assert torch.equal(mean(x), mean(x))  # frozen: no noise
    layer.r2.fill_(0.9)
    average.update_parameters(layer)  # between "not calibrated" and 0.9: not calibrated
    assert gates(mean)[0].r2 is None


# --- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "gate",
    [{}, {"granularity": "layer"}, {"kind": "hard"}, {"kind": "random"}]
    + [{"kind": "fixed", "value": v} for v in (0.0, 0.5, 1.0)],
    ids=str,
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_stays_visible_and_does_not_spread(bad, gate, strength):
    layer = make(strength=strength, **gate)
    x = sample(shape=(2, 3))
    spoilt = x.clone()
    spoilt[1, 1, 2] = bad
    seen = {}
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(0)
        clean = layer(x)
        torch.manual_seed(0)
        dirty = layer(spoilt)
        keep = torch.ones(2, 3, dtype=torch.bool)
        keep[1, 1] = False
        assert torch.equal(dirty[keep], clean[keep])
        if math.isnan(bad):
            assert dirty[1, 1, 2].isnan()
        seen[training] = dirty[1, 1].isnan()
    assert torch.equal(seen[True], seen[False])
    if not math.isnan(bad) and not (gate.get("value") == 0 and strength == 1):
        assert seen[True].any()  # an overflow is not hidden, unless the norm is gone altogether


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_and_large_inputs_are_finite_with_finite_gradients(dtype):
    for x in (torch.zeros(2, 3, D), torch.full((2, 3, D), 1e-30), 6e4 * torch.ones(2, 3, D), 1e4 * sample()):
        layer = make(branches=("dyt", "dyisru", "derf", "rms_norm")).to(dtype).train()
        x = x.to(dtype).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.new_parameters())


# --- noise and freezing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gumbel", "hard", "random"])
def test_noise_only_in_training_and_by_the_seed(kind):
    layer, x = make(kind=kind), sample(shape=(20, 5))
    state = torch.get_rng_state()
    a, b = layer.eval()(x), layer(x)
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    layer.train()
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["gumbel", "softmax", "hard"])
@pytest.mark.parametrize("granularity", ["token", "layer"])
def test_a_frozen_gate_is_silent_and_gets_a_gradient_of_zero(kind, granularity):
    layer, x = make(kind=kind, granularity=granularity).train(), sample(shape=(20, 5)).requires_grad_()
    layer.freeze()
    state = torch.get_rng_state()
    y = layer(x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(y, layer.eval()(x))
    y.square().sum().backward()
    assert all(p.grad is not None and not p.grad.any() and p.requires_grad for p in layer.bias_gate.parameters())
    if kind != "hard":
        assert all(p.grad.any() for p in layer.bias_branches.parameters())
    layer.drop_frozen_gradients()
    assert all(p.grad is None for p in layer.bias_gate.parameters())
    assert all(p.grad is not None for p in layer.bias_branches.parameters())
    layer.unfreeze()
    layer.train().zero_grad()
    layer(x).square().sum().backward()
    assert layer.bias_gate.bias_out.grad.any()
    layer.drop_frozen_gradients()
    assert layer.bias_gate.bias_out.grad is not None


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_frozen_gate_is_bit_constant_under_any_optimizer(optimizer, set_to_none):
    layer = make().train()
    optimizer = optimizer(layer.parameters())
    for step in range(6):
        if step == 3:
            layer.freeze()
            kept = {name: p.detach().clone() for name, p in layer.bias_gate.named_parameters()}
            moving = layer.bias_branches[0].weight.detach().clone()
        optimizer.zero_grad(set_to_none=set_to_none)
        layer(sample(seed=step)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        layer.drop_frozen_gradients()
        optimizer.step()
    assert all(same_bits(p, kept[name]) for name, p in layer.bias_gate.named_parameters())
    assert not torch.equal(layer.bias_branches[0].weight, moving)


@pytest.mark.parametrize("tau", [1.0, 0.1, 1e-3, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gumbel", "hard", "random"])
def test_a_million_draws_are_finite_and_sum_to_one(kind, dtype, tau):
    gate = make(kind=kind, tau=tau).to(dtype).train().bias_gate
    weights, log_p = gate(torch.randn(500_000 if tau == 0.1 else 20_000, D, dtype=torch.float32))
    assert weights.isfinite().all() and log_p.isfinite().all() and (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))


def test_gumbel_noise_is_gumbel():
    """The share of samples in which the original wins is its probability (the Gumbel-max theorem), for every τ."""
    gate = AutoNorm(nn.LayerNorm(D), ("dyt", "rms_norm"), GateConfig(init_norm_weight=0.7)).train().bias_gate
    torch.manual_seed(0)
    weights, _ = gate(torch.randn(200_000, D))
    share = F.one_hot(weights.argmax(-1), 3).double().mean(0)
    torch.testing.assert_close(share, torch.tensor([0.7, 0.15, 0.15]).double(), rtol=0, atol=0.005)


# --- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_building_a_layer_draws_nothing_and_leaves_the_norm_alone(norm):
    original = NORMS[norm]()
    before = {name: (id(p), p.clone(), p.requires_grad) for name, p in original.named_parameters()}
    attributes = {k: id(v) for k, v in vars(original).items()}
    state = torch.get_rng_state()
    one, two = (AutoNorm(original, BRANCHES, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert {k: id(v) for k, v in vars(original).items()} == attributes
    for name, p in original.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.requires_grad == before[name][2]
    for (name, p), q in zip(one.named_parameters(), two.parameters()):
        assert torch.equal(p, q), name


def test_reset_parameters_returns_to_the_start():
    layer = AutoNorm(nn.LayerNorm(D), BRANCHES, generator=torch.Generator().manual_seed(4))
    start = {k: v.clone() for k, v in layer.state_dict().items()}
    with torch.no_grad():
        for p in layer.new_parameters():
            p.add_(1)
        layer.bias_branches[0].set_slope(0.01)
        layer.r2.fill_(0.3)
        layer.train()(sample())
    layer.reset_parameters(torch.Generator().manual_seed(4))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, start[name]), name


def test_unknown_branch_is_named():
    with pytest.raises(ConfigError, match="nearest: 'dyt'"):
        AutoNorm(nn.LayerNorm(D), ("dyd",))


@given(st.sampled_from(sorted(NORMS)), st.sampled_from(KINDS), st.booleans())
def test_repr_names_the_layer_and_its_state(norm, kind, frozen):
    layer = make(norm, kind=kind, strength=0.25)
    layer.set_scalar("frozen", float(frozen))
    text = repr(layer.to(torch.bfloat16))
    assert kind in text and "strength=0.25" in text and f"frozen={frozen}" in text and "dyt" in text
