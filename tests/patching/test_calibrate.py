"""Calibration: the fit is the least-squares one, what it must not touch stays, and it may fail without a trace."""

import copy
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_autonorm import GateConfig, calibrate, gates, patch, set_strength
from hf_autonorm.errors import ConfigError, NotPatchedError
from hf_autonorm.nn import AutoNorm
from hf_autonorm.nn.autonorm import UNCALIBRATED
from hf_autonorm.patching.lockstep import Lockstep
from tests.models import FAMILIES, albert, build, mixtral, perturb_norms, run, same_bits, tokens


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, AutoNorm)}


def state_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def longer(seed=0, batch=4, length=16):
    return tokens(batch, length, seed)


class Net(nn.Module):
    """Two norms in a row of linear layers."""

    def __init__(self, width=6, kind=nn.LayerNorm):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2 = kind(width), kind(width)

    def forward(self, x, attention_mask=None):
        return self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))


def net(seed=0, kind=nn.LayerNorm, **fields):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return patch(perturb_norms(Net(kind=kind)), **fields)


# --- the fit ---------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(0, 99), st.sampled_from(["dyt", "derf", "dyisru"]), st.floats(0.05, 20), st.booleans())
def test_scale_and_shift_are_the_least_squares_solution(seed, branch, size, bias):
    curve = {
        "dyt": np.tanh,
        "dyisru": lambda z: z / np.sqrt(1 + z * z),
        "derf": lambda z: torch.erf(torch.tensor(z)).numpy(),
    }
    model = net(seed, kind=lambda d: nn.LayerNorm(d, bias=bias), norm=branch)
    x = size * torch.randn(50, 6, generator=torch.Generator().manual_seed(seed))
    seen = []
    model.norm1.register_forward_hook(lambda m, args, y: seen.append((args[0], y)))
    set_strength(model, 0.0), model(x), set_strength(model, 1.0)
    inputs, wanted = (t.detach().double().numpy() for t in seen[0])
    report = calibrate(model, [x])
    layer = model.norm1
    t = curve[branch](layer.bias_branches[0].slope().item() * inputs)
    best = 0.0
    for channel in range(6):
        columns = [t[:, channel]] + ([np.ones(len(t))] if bias else [])
        solution, *_ = np.linalg.lstsq(np.stack(columns, 1), wanted[:, channel], rcond=None)
        np.testing.assert_allclose(layer.bias_branches[0].weight[channel].item(), solution[0], rtol=1e-4, atol=1e-5)
        if bias:
            np.testing.assert_allclose(layer.bias_branches[0].bias[channel].item(), solution[1], rtol=1e-4, atol=1e-5)
        best += ((np.stack(columns, 1) @ solution - wanted[:, channel]) ** 2).sum()
    r2 = 1 - best / ((wanted - wanted.mean(0)) ** 2).sum()
    assert report.rows[0].name == "norm1" and report.rows[0].r2 == pytest.approx(r2, abs=1e-5)
    assert report.rows[0].alpha == pytest.approx(layer.bias_branches[0].slope().item())
    # α is no worse than any other on a fine grid
    for alpha in np.geomspace(1e-3, 30, 60) / np.sqrt((inputs**2).mean()):
        t = curve[branch](alpha * inputs)
        left = 0.0
        for channel in range(6):
            columns = np.stack([t[:, channel]] + ([np.ones(len(t))] if bias else []), 1)
            solution, *_ = np.linalg.lstsq(columns, wanted[:, channel], rcond=None)
            left += ((columns @ solution - wanted[:, channel]) ** 2).sum()
        assert best <= left * 1.01 + 1e-9


@settings(max_examples=10)
@given(st.integers(0, 99))
def test_what_a_branch_can_represent_it_fits_exactly(seed):
    """A norm over one token kind is affine in tanh: here the original itself is replaced by a tanh."""
    generator = torch.Generator().manual_seed(seed)
    model = patch(nn.Sequential(nn.LayerNorm(6)), norm="dyt")
    weight, bias, alpha = torch.randn(6, generator=generator), torch.randn(6, generator=generator), 0.3

    class Tanh(nn.Module):
        def forward(self, x):
            return weight * torch.tanh(alpha * x) + bias

    model[0].original = Tanh()
    report = calibrate(model, [3 * torch.randn(200, 6, generator=generator)])
    branch = model[0].bias_branches[0]
    assert report.rows[0].r2 > 0.9999 and report.cosine_after > 0.9999
    assert branch.slope().item() == pytest.approx(alpha, rel=0.05)
    torch.testing.assert_close(branch.weight.detach(), weight, rtol=0.1, atol=0.05)


def test_each_layer_is_fitted_on_what_the_fitted_layers_before_it_give():
    model = net(norm="dyt")
    x = torch.randn(300, 6)
    originals = copy.deepcopy(model)
    set_strength(originals, 0.0)
    with torch.no_grad():
        wanted = originals(x)
        calibrate(model, [x])
        inputs = model.second(torch.relu(model.norm1(model.first(x)))).double()
    branch = model.norm2.bias_branches[0]
    t = torch.tanh(branch.slope() * inputs).detach().numpy()
    for channel in range(6):
        columns = np.stack([t[:, channel], np.ones(len(t))], 1)
        solution, *_ = np.linalg.lstsq(columns, wanted[:, channel].double().numpy(), rcond=None)
        np.testing.assert_allclose(branch.weight[channel].item(), solution[0], rtol=1e-3, atol=1e-4)


def test_batches_count_together():
    one, two = (patch(build("bert")[0], branches=["dyt", "rms_norm"]) for _ in range(2))
    a, b = longer(0), longer(1)
    both = {k: torch.cat([a[k], b[k]]) for k in a}
    first, second = calibrate(one, [a, b]), calibrate(two, both)
    assert [row.name for row in first.rows] == [row.name for row in second.rows]
    for x, y in zip(first.rows, second.rows):
        assert x.r2 == pytest.approx(y.r2, abs=1e-5)
    for name, p in one.named_parameters():
        torch.testing.assert_close(p, dict(two.named_parameters())[name], rtol=1e-4, atol=1e-5)
    assert first.cosine_after == pytest.approx(second.cosine_after, abs=1e-6)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_fitted_and_keeps_its_function_at_strength_zero(family):
    model, inputs = build(family)
    expected = run(model, inputs)
    patch(model, branches=["dyt", "rms_norm"], strength=0.25)
    uncalibrated = {name: layer.bias_branches[0].weight.detach().clone() for name, layer in layers_of(model).items()}
    modes = {m: (i % 2 == 0) for i, m in enumerate(model.modules())}
    for module, mode in modes.items():
        module.training = mode
    hooks = {m: (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    state, running = torch.get_rng_state(), threading.active_count()
    report = calibrate(model, [inputs, inputs])
    assert torch.equal(torch.get_rng_state(), state) and threading.active_count() == running
    assert all(module.training == mode for module, mode in modes.items())
    assert hooks == {m: (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    assert all(p.grad is None for p in model.parameters())
    layers = layers_of(model)
    assert [row.name for row in report.rows] == [name for name in layers for _ in range(2)] and not report.never_called
    for row in report.rows:
        layer = layers[row.name]
        assert row.r2 <= 1 and layer.scalar("strength") == 0.25
        assert layer.r2[layer.branch_names.index(row.branch)].item() == pytest.approx(row.r2, rel=1e-5, abs=1e-6)
    assert any(not torch.equal(layers[name].bias_branches[0].weight, w) for name, w in uncalibrated.items())
    assert gates(model)[0].r2.keys() == {"dyt", "rms_norm"} and f"{report.cosine_after:.4f}" in str(report)
    set_strength(model.eval(), 0.0)
    assert all(same_bits(a, b) for a, b in zip(run(model, inputs), expected))


def test_calibration_brings_the_function_back():
    for family in ("bert", "llama", "vit", "convnext"):
        model, inputs = build(family)
        report = calibrate(patch(model, norm="dyt"), [inputs])
        assert report.cosine_after > report.cosine_before - 0.02 and report.cosine_after > 0.5, family


# --- padding ---------------------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Takes vectors and a mask."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x, attention_mask):
        return self.norm(x)


EMBEDDED = patch(Embedded(), branches=["dyt", "rms_norm"])


@given(st.sampled_from([float("nan"), float("inf"), 1e6, 0.0]), st.integers(0, 99))
def test_padding_is_left_out(garbage, seed):
    generator = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(3, 8, 6, generator=generator), torch.rand(3, 8, generator=generator) > 0.3
    results = []
    for filling in (0.5, garbage):
        model = copy.deepcopy(EMBEDDED)
        batch = {"x": torch.where(mask[..., None], x, torch.tensor(filling)), "attention_mask": mask.long()}
        report = calibrate(model, [batch])
        results.append((state_of(model), [row.r2 for row in report.rows]))
    assert results[0][1] == results[1][1]
    assert all(same_bits(v, results[1][0][k]) for k, v in results[0][0].items())


def test_values_that_are_no_numbers_and_constant_outputs_do_no_harm():
    model = patch(nn.Sequential(nn.LayerNorm(6)))
    x = torch.randn(50, 6)
    x[3, 2], x[7] = float("nan"), float("inf")
    report = calibrate(model, [x])
    assert all(p.isfinite().all() for p in model.parameters()) and report.rows[0].r2 <= 1
    for x in (torch.zeros(10, 6), torch.full((10, 6), 1e4), torch.randn(1, 6).expand(10, 6)):
        model = patch(nn.Sequential(nn.LayerNorm(6)))
        report = calibrate(model, [x])
        assert all(p.isfinite().all() for p in model.parameters())
        assert all(row.r2 <= 1 for row in report.rows)


@pytest.mark.parametrize("x", [torch.ones(1, 6), torch.full((9, 6), float("nan")), torch.zeros(0, 6)])
def test_nothing_to_fit_on_is_an_error_that_changes_nothing(x):
    model = patch(nn.Sequential(nn.LayerNorm(6)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="nothing to fit on"):
        calibrate(model, [x])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_massive_activations_do_not_push_r2_above_one():
    model = patch(nn.Sequential(nn.RMSNorm(6)))
    x = torch.randn(500, 6)
    x[:, 0] *= 3e4
    (row,) = calibrate(model, [x]).rows
    assert row.r2 <= 1 and np.isfinite(row.r2)
    assert model[0].bias_branches[0].slope() > 0


# --- models with ways of their own -----------------------------------------------------------------------------------


def test_a_layer_called_three_times_is_fitted_on_all_its_calls():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = patch(perturb_norms(albert()).eval())
    counts = {}
    for name, layer in layers_of(model).items():
        layer.register_forward_hook(lambda *_, name=name: counts.__setitem__(name, counts.get(name, 0) + 1))
    report = calibrate(model, [longer(0), longer(1)])
    assert len(report.rows) == 3 and sorted(set(counts.values())) != [1] and not report.never_called
    assert all(row.r2 <= 1 for row in report.rows) and report.cosine_after > 0.9


@pytest.mark.parametrize("norm", ["autonorm", "dyt"])
def test_experts_may_send_tokens_another_way(norm):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = patch(perturb_norms(mixtral()).eval(), norm=norm)
    report = calibrate(model, [longer(i) for i in range(3)])
    assert len(report.rows) == len(layers_of(model)) == 5 and all(row.r2 <= 1 for row in report.rows)


class Divided(nn.Module):
    """Sends each batch through one of two norms; which one depends on a norm before it."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.last, self.never = (nn.LayerNorm(6) for _ in range(5))

    def forward(self, x):
        h = self.first(x)
        return self.last(self.a(h) if h.mean() > h.median() else self.b(h))


def test_passes_may_part_ways_and_a_norm_may_never_be_called():
    model = patch(Divided(), norm="dyt")
    report = calibrate(model, [torch.randn(20, 6).exp() * sign for sign in (1, -1, 1, -1, 1)])
    assert {"first", "last"} <= {row.name for row in report.rows} and "never" in report.never_called


@pytest.mark.parametrize("granularity, branches", [("sequence", ["dyt"]), ("token", ["dyt", "film"])])
def test_layers_that_pool_see_their_own_batchs_mask(granularity, branches):
    fields = dict(gate=GateConfig(granularity=granularity), branches=branches)
    one, two = (patch(build("bert")[0], **fields) for _ in range(2))
    a, b = longer(0), longer(1)
    b["attention_mask"][:, 3:] = 0
    first = calibrate(one, [a, b])
    second = calibrate(two, {k: torch.cat([a[k], b[k]]) for k in a})
    for x, y in zip(first.rows, second.rows):
        assert x.r2 == pytest.approx(y.r2, abs=1e-4)


def test_inputs_may_be_tensors_tuples_or_one_mapping():
    x = torch.randn(40, 6)
    states = []
    for batches in ([x], x, [(x,)], [{"x": x}], {"x": x}, iter([x])):
        model = net(norm="dyt")
        calibrate(model, batches)
        states.append(state_of(model))
    assert all(same_bits(v, other[k]) for other in states for k, v in states[0].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    model = patch(build("bert")[0].to(dtype), norm="dyt")
    report = calibrate(model, [longer()])
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())
    assert all(row.r2 <= 1 for row in report.rows) and report.cosine_after > 0.5


@pytest.mark.parametrize(
    "surroundings", [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_surroundings(surroundings):
    model, inputs = build("bert")
    patch(model, norm="dyt")
    with surroundings():
        inside = calibrate(model, [inputs])
    twin = patch(build("bert")[0], norm="dyt")
    outside = calibrate(twin, [inputs])
    for a, b in zip(inside.rows, outside.rows):
        assert a.r2 == pytest.approx(b.r2, abs=0.05)
    assert inside.cosine_after == pytest.approx(outside.cosine_after, abs=0.01)
    model.train()(**inputs)["logits"].sum().backward()  # still trains


def test_selectors_see_inputs_of_size_one():
    model = net(branches=["dyt"])
    x = 300 * torch.randn(100, 6)
    seen = []
    model.norm1.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    calibrate(model, [x])
    size = seen[0].square().mean(-1).sqrt().mean().item()
    spread = model.norm1.bias_gate.weight_in.double().square().mean().sqrt().item()
    assert spread * size == pytest.approx((3 * 6) ** -0.5, rel=0.01)
    with torch.no_grad():
        model.norm1.bias_gate.weight_out.fill_(0.1)  # it has learned something
        before = model.norm1.bias_gate.weight_in.clone()
    calibrate(model, [x / 300])
    assert torch.equal(model.norm1.bias_gate.weight_in, before)


# --- failures --------------------------------------------------------------------------------------------------------


class Fails(Net):
    """Fails in the forward number `at`, before or after its first norm."""

    at, late, count = 1, True, 0

    def forward(self, x):
        type(self).count += 1
        if type(self).count == self.at and not self.late:
            raise RuntimeError("broken on purpose")
        h = self.second(torch.relu(self.norm1(self.first(x))))
        if type(self).count == self.at or (self.late and type(self).count > self.at):
            raise RuntimeError("broken on purpose")
        return self.norm2(h)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_an_exception_in_forward_comes_through_and_leaves_no_trace(at, late):
    model = patch(Fails(), norm="dyt", strength=0.5).train()
    Fails.at, Fails.late, Fails.count = at, late, 0
    before, running = state_of(model), threading.active_count()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(RuntimeError, match="broken on purpose"):
        calibrate(model, [torch.randn(5, 6) for _ in range(3)])
    assert all(same_bits(v, before[k]) for k, v in model.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert model.training and all(layer.scalar("strength") == 0.5 for layer in layers_of(model).values())
    time.sleep(0.01)
    assert threading.active_count() == running


def test_what_cannot_be_calibrated_says_so():
    with pytest.raises(NotPatchedError, match="call patch"):
        calibrate(nn.LayerNorm(6), [torch.randn(3, 6)])
    model = net()
    with pytest.raises(ConfigError, match="no batch"):
        calibrate(model, [])
    assert gates(model)[0].r2 is None and UNCALIBRATED in model.norm1.r2


# --- lockstep --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=5))
def test_lockstep_deals_each_key_once_and_returns_in_order(routes):
    lockstep, dealt, order = Lockstep(), [], []

    def work(index):
        for key in routes[index]:
            lockstep.meet(key, (index, key))
            assert key in [k for k, _ in dealt]  # nobody goes on before the key was dealt with
            order.append((index, key))
        return index

    running = threading.active_count()
    results = lockstep.run([lambda i=i: work(i) for i in range(len(routes))], lambda k, p: dealt.append((k, p)))
    assert results == list(range(len(routes)))
    keys = [key for key, _ in dealt]
    assert len(keys) == len(set(keys)) and set(keys) == {key for route in routes for key in route}
    assert all(payload[1] == key and payloads for key, payloads in dealt for payload in payloads)
    if len({tuple(route) for route in routes}) == 1:  # all go the same way: everybody is waited for
        assert all([i for i, _ in payloads] == list(range(len(routes))) for _, payloads in dealt)
    assert threading.active_count() == running


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_lockstep_ends_all_when_one_fails(works, broken, after, in_deal):
    lockstep, went_on = Lockstep(), []
    broken %= works

    def work(index):
        for key in range(3):
            if index == broken and key == after and not in_deal:
                raise KeyError("broken")
            lockstep.meet(key, index)
            went_on.append((index, key))

    def deal(key, payloads):
        if in_deal and key == after:
            raise KeyError("broken")

    running = threading.active_count()
    with pytest.raises(KeyError, match="broken"):
        lockstep.run([lambda i=i: work(i) for i in range(works)], deal)
    assert all(key < after for _, key in went_on)
    for _ in range(100):
        if threading.active_count() == running:
            break
        time.sleep(0.01)
    assert threading.active_count() == running


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lockstep_keeps_the_callers_autocast(dtype):
    linear = nn.Linear(3, 3)
    assert Lockstep().run([lambda: linear(torch.ones(1, 3)).dtype], lambda *_: None) == [torch.float32]
    with torch.autocast("cpu", dtype):
        assert Lockstep().run([lambda: linear(torch.ones(1, 3)).dtype] * 2, lambda *_: None) == [dtype] * 2


def test_lockstep_ends_a_pass_that_swallows_the_end():
    lockstep, running = Lockstep(), threading.active_count()

    def stubborn():
        for key in range(3):
            try:
                lockstep.meet(key, None)
            except BaseException:
                pass

    def deal(key, payloads):
        raise KeyError("broken")

    with pytest.raises(KeyError):
        lockstep.run([stubborn] * 2, deal)
    time.sleep(0.05)
    assert threading.active_count() == running


def test_lockstep_runs_without_gradients_and_one_at_a_time():
    lockstep, active = Lockstep(), []

    def work():
        for key in range(3):
            active.append(1)
            assert len(active) == 1 and not torch.is_grad_enabled()
            active.pop()
            lockstep.meet(key, None)

    lockstep.run([work] * 4, lambda key, payloads: None)
    assert lockstep.run([], lambda key, payloads: None) == []


def test_a_small_slope_goes_into_the_scale_and_stays_there_in_half_precision():
    """A parameter of 0.001 would be thrown about by optimizer steps of the size of the learning rate."""
    model = patch(nn.Sequential(nn.LayerNorm(6)))
    calibrate(model, [300 * torch.randn(200, 6)])
    branch = model[0].bias_branches[0]
    assert float(branch.alpha.detach()) == 0.5 and 0 < branch.slope().item() < 0.05
    slope = branch.slope().item()
    model.half()
    assert branch.alpha_scale.dtype == torch.float32 and branch.slope().item() == pytest.approx(slope, rel=1e-6)
