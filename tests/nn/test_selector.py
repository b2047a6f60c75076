"""The gate alone: shapes, sums, start, dtype, settings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_autonorm import GateConfig
from hf_autonorm.errors import ConfigError
from hf_autonorm.nn import NormSelector
from tests.models import same_bits

KINDS = ("gumbel", "softmax", "hard", "random", "fixed")


def make(width=6, branches=2, seed=0, dtype=torch.float32, perturb=0.5, **gate):
    if gate.get("kind") == "fixed":
        gate.setdefault("value", 0.3)
    selector = NormSelector(width, branches, GateConfig(**gate), dtype=dtype)
    selector.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for p in selector.parameters():
            p.add_(perturb * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return selector


@given(
    st.sampled_from(KINDS),
    st.sampled_from(["token", "sequence", "layer"]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([(5,), (2, 3), (2, 3, 4)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_weights_are_a_distribution_of_the_right_shape(kind, granularity, branches, training, lead, dtype):
    selector = make(branches=branches, kind=kind, granularity=granularity, dtype=dtype).train(training)
    weights, log_p = selector(3 * torch.randn(*lead, 6))
    assert weights.dtype == log_p.dtype == torch.float32
    assert (weights >= 0).all() and weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(log_p.shape[:-1]), rtol=1e-4, atol=1e-4)
    pooled = {"token": lead, "layer": (), "sequence": (lead[0], *[1] * (len(lead) - 1))}[granularity]
    if selector.learns:
        assert weights.shape == log_p.shape == (*pooled, branches + 1)
    if kind == "hard":
        assert torch.equal(weights.sort(-1).values[..., -1], torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("kind", ["gumbel", "softmax", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_starts_at_the_norm_weight_for_every_input(kind, dtype):
    selector = make(kind=kind, init_norm_weight=0.9, perturb=0, dtype=dtype).eval()
    _, log_p = selector(100 * torch.randn(50, 6, dtype=dtype))
    expected = torch.tensor([0.9, 0.05, 0.05], dtype=dtype).expand(50, 3)
    torch.testing.assert_close(log_p.exp(), expected, rtol=1e-6, atol=1e-7)


@given(
    st.floats(1e-4, 1 - 1e-4),
    st.integers(1, 4),
    st.sampled_from(["token", "sequence", "layer"]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_starts_at_the_norm_weight_in_half_precision_too(start, branches, granularity, dtype, cast_later):
    gate = GateConfig(init_norm_weight=start, granularity=granularity)
    selector = NormSelector(6, branches, gate, dtype=torch.float32 if cast_later else dtype).eval()
    selector.reset_parameters(torch.Generator().manual_seed(0))
    _, log_p = selector.to(dtype)(torch.randn(2, 5, 6))
    expected = torch.tensor([start] + [(1 - start) / branches] * branches)
    torch.testing.assert_close(log_p.exp(), expected.expand_as(log_p), rtol=0, atol=1e-5)


@given(st.integers(1, 300), st.sampled_from([1, 4, 16, 0.5, 0.25, 0.01]))
def test_hidden_width(width, hidden):
    selector = NormSelector(width, 1, GateConfig(hidden=hidden))
    expected = max(1, hidden if hidden >= 1 else int(hidden * width))
    assert selector.weight_in.shape == (expected, width) and selector.weight_out.shape == (2, expected)


def test_only_the_seed_decides_the_start():
    one, two = (NormSelector(6, 1, GateConfig()) for _ in range(2))
    state = torch.get_rng_state()
    one.reset_parameters(torch.Generator().manual_seed(1))
    two.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(same_bits(p, q) for p, q in zip(one.parameters(), two.parameters()))
    two.reset_parameters(torch.Generator().manual_seed(2))
    assert not torch.equal(one.weight_in, two.weight_in)
    assert one.weight_in.abs().max() <= 6**-0.5 and one.weight_in.std() > 0.5 * (3 * 6) ** -0.5


@pytest.mark.parametrize("kind", ["gumbel", "hard", "softmax"])
def test_a_pooled_gate_sees_valid_tokens_only(kind):
    selector = make(kind=kind, granularity="sequence").eval()
    rows, mask = torch.randn(3, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]]).bool()
    _, log_p = selector(rows, mask)
    for row in range(3):
        _, alone = selector(rows[row][mask[row]][None])
        torch.testing.assert_close(log_p[row], alone[0])
    _, unmasked = selector(rows)
    _, wrong_shape = selector(rows, mask[:, :4])  # a mask of another shape says nothing about these rows
    torch.testing.assert_close(wrong_shape, unmasked)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_a_pooled_gate_has_finite_gradients_whatever_is_in_the_padding(garbage):
    selector = make(granularity="sequence").train()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    rows = torch.where(mask[..., None], torch.randn(2, 3, 6), torch.tensor(garbage)).requires_grad_()
    weights, log_p = selector(rows, mask)
    assert weights.isfinite().all() and log_p.isfinite().all()
    (weights * torch.randn(weights.shape)).sum().backward()
    assert all(t.grad.isfinite().all() for t in (rows, *selector.parameters()))


def test_random_weights_are_uniform_on_the_simplex():
    for branches in (1, 2, 3):
        selector = make(branches=branches, kind="random").train()
        torch.manual_seed(0)
        weights, log_p = selector(torch.randn(40_000, 6))
        # A coordinate of a uniform point on the simplex of K+1 weights has P(w > t) = (1 − t)^K.
        for t in (0.1, 0.3, 0.5, 0.7):
            share = (weights > t).double().mean(0)
            torch.testing.assert_close(share, torch.full_like(share, (1 - t) ** branches), rtol=0, atol=0.01)
        assert not list(selector.parameters())
        torch.testing.assert_close(log_p.exp(), torch.full((branches + 1,), 1 / (branches + 1)))


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "gumble"},
        {"granularity": "word"},
        {"tau": 0},
        {"tau": -1.0},
        {"tau": float("nan")},
        {"tau": float("inf")},
        {"tau": True},
        {"tau": "0.5"},
        {"hidden": 0},
        {"hidden": 1.5},
        {"hidden": -3},
        {"hidden": True},
        {"init_norm_weight": 0.0},
        {"init_norm_weight": 1.0},
        {"init_norm_weight": 1.5},
        {"init_norm_weight": None},
        {"kind": "fixed"},
        {"kind": "fixed", "value": 2.0},
        {"kind": "fixed", "value": -0.1},
        {"kind": "fixed", "value": True},
        {"value": 0.5},
        {"init_norm_weight": float("nan")},
        {"hidden": float("nan")},
        {"hidden": float("inf")},
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_the_field_and_the_range(settings):
    with pytest.raises(ConfigError) as error:
        GateConfig(**settings)
    assert any(name in str(error.value) for name in settings) and len(str(error.value).split()) > 5


def test_a_field_that_does_not_exist_names_the_nearest():
    with pytest.raises(ConfigError, match="nearest: 'granularity'"):
        GateConfig.from_dict({"granularty": "token"})
