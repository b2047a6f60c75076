"""The branches by their papers' formulas, pooling under a mask, and a user's own branch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import LayerNorm2d
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_autonorm import GateConfig, PatchConfig, patch, register_branch
from hf_autonorm.errors import ConfigError
from hf_autonorm.nn import AutoNorm, Branch, DynamicTanh, PointwiseBranch
from hf_autonorm.nn.autonorm import MaskHolder, valid_tokens
from hf_autonorm.nn.branches import BRANCHES, masked_mean

D = 8


@torch.no_grad()
def perturbed(norm):
    for p in norm.parameters():
        p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    return norm.double()


def branch_of(name, norm):
    branch = BRANCHES[name](norm, dtype=torch.float64)
    branch.reset_parameters()
    return branch


@given(st.sampled_from(["layer_norm", "no_bias", "plain", "t5", "gemma"]), st.floats(0.01, 5), st.integers(0, 99))
def test_branches_start_from_the_norms_scale_and_shift(kind, size, seed):
    norm = perturbed(
        {
            "layer_norm": lambda: nn.LayerNorm(D),
            "no_bias": lambda: nn.LayerNorm(D, bias=False),
            "plain": lambda: nn.LayerNorm(D, elementwise_affine=False),
            "t5": lambda: T5LayerNorm(D),
            "gemma": lambda: GemmaRMSNorm(D),
        }[kind]()
    )
    weight = getattr(norm, "weight", None)
    weight = torch.ones(D).double() if weight is None else weight + (kind == "gemma")
    bias = getattr(norm, "bias", None)
    bias = torch.zeros(D).double() if bias is None else bias
    x = size * torch.randn(5, 3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean = x.mean(-1, keepdim=True)
    deviation = (((x - mean) ** 2).mean(-1, keepdim=True) + 1e-6).sqrt()
    rms = ((x**2).mean(-1, keepdim=True) + 1e-6).sqrt()
    standard = (x - mean) / deviation
    expected = {
        "dyt": weight * torch.tanh(0.5 * x) + bias,
        "derf": weight * torch.erf(0.5 * x) + bias,
        "dyisru": weight * (0.5 * x) / (1 + (0.5 * x) ** 2).sqrt() + bias,
        "rms_norm": weight * x / rms + bias,
        "adanorm": (1 - 0.1 * standard) * standard,
        "film": weight * (x / rms if kind in ("t5", "gemma") else standard) + bias,
    }
    for name, value in expected.items():
        branch = branch_of(name, norm)
        torch.testing.assert_close(branch(x), value, rtol=1e-5, atol=1e-5)
        if name != "adanorm":  # a scale and a shift are learned where the norm learns them, and nowhere else
            assert isinstance(branch.weight, nn.Parameter) == (kind != "plain")
            assert (branch.bias is not None) == (kind == "layer_norm")
        assert all(p.ndim >= 1 for p in branch.parameters())


def test_film_is_conditioned_on_the_pooled_input():
    norm = perturbed(nn.LayerNorm(D))
    film = branch_of("film", norm)
    with torch.no_grad():
        film.weight_out.copy_(torch.randn(film.weight_out.shape))
    x = torch.randn(3, 4, D, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    y = film(x, mask)
    for row in range(3):
        pooled = x[row][mask[row]].mean(0)
        gamma, beta = (film.weight_out @ torch.relu(film.weight_in @ pooled)).chunk(2)
        n = (x[row] - x[row].mean(-1, keepdim=True)) / (x[row].var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(y[row], (norm.weight + gamma) * n + norm.bias + beta)


def test_adanorms_factor_is_detached():
    adanorm = branch_of("adanorm", nn.LayerNorm(D))
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, D, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(adanorm(x), x, grad)
    y = nn.functional.layer_norm(x, (D,), eps=1e-6)
    (expected,) = torch.autograd.grad(y, x, (1 - 0.1 * y.detach()) * grad)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", sorted(BRANCHES))
def test_channels_first_is_channels_last_transposed(name):
    first, last = perturbed(LayerNorm2d(D)), perturbed(nn.LayerNorm(D, eps=1e-6))
    x = torch.randn(2, D, 3, 4, dtype=torch.float64)
    one, two = branch_of(name, first), branch_of(name, last)
    for p, q in zip(one.parameters(), two.parameters()):
        q.data.copy_(p)
    torch.testing.assert_close(one(x), two(x.movedim(1, -1)).movedim(-1, 1))


# --- pooling ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9999),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    st.sampled_from([(), (3,)]),
)
def test_masked_mean_never_sees_padding(batch, length, seed, garbage, between):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, *between, D, generator=generator)
    mask = torch.rand(batch, length, generator=generator) > 0.4
    spoilt = torch.where(
        mask.view(batch, length, *[1] * (len(between) + 1)), x, torch.tensor(garbage)
    ).requires_grad_()
    pooled = masked_mean(spoilt, mask)
    assert pooled.shape == (batch, 1, *[1] * len(between), D)
    for row in range(batch):
        own = x[row][mask[row]].reshape(-1, D)
        expected = own.mean(0) if len(own) else torch.zeros(D)  # a row without a valid token gives zeros
        torch.testing.assert_close(pooled[row].flatten(), expected)
    pooled.sum().backward()
    assert spoilt.grad.isfinite().all() and not spoilt.grad[~mask].any()


@pytest.mark.parametrize("granularity, branches", [("sequence", ["dyt"]), ("token", ["film"])])
def test_layers_that_pool_leave_padding_out_of_valid_tokens(granularity, branches):
    layer = AutoNorm(nn.LayerNorm(D), branches, GateConfig(kind="softmax", granularity=granularity))
    with torch.no_grad():
        for p in layer.new_parameters():
            p.add_(0.5 * torch.randn(p.shape))
    layer.mask_holder = MaskHolder()
    x = torch.randn(3, 4, D)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    layer.mask_holder.fill(mask)
    clean = layer(x)
    for garbage in (float("nan"), float("inf"), 1e20):
        y = layer(torch.where(mask[..., None] > 0, x, torch.tensor(garbage)))
        assert torch.equal(y[mask > 0], clean[mask > 0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16])
def test_masks_of_every_kind_say_the_same(dtype):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    expected = mask.bool()
    assert torch.equal(valid_tokens(mask.to(dtype)), expected)
    four = mask[:, None, None, :].expand(3, 1, 3, 3)
    assert torch.equal(valid_tokens(four.bool()), expected)
    for lowest in (float("-inf"), torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e4):
        assert torch.equal(valid_tokens((1 - four.float()).masked_fill(four == 0, lowest)), expected)
    for other in (None, "mask", mask[0], mask[None], [mask]):
        assert valid_tokens(other) is None


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.fixture
def registry():
    before = dict(BRANCHES)
    yield BRANCHES
    BRANCHES.clear()
    BRANCHES.update(before)


def test_a_users_own_branch_works_everywhere(registry):
    @register_branch("softsign")
    class SoftSign(PointwiseBranch):
        def curve(self, z):
            return z / (1 + z.abs())

    @register_branch("zero")
    class Zero(Branch):
        def forward(self, x, mask=None):
            return self.affine(torch.zeros_like(x))

    net = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))
    patch(net, branches=["softsign", "zero"], gate=GateConfig(kind="fixed", value=0.2))
    x = torch.randn(5, D)
    h = net[0](x)
    expected = 0.2 * nn.functional.layer_norm(h, (D,)) + 0.4 * (0.5 * h) / (1 + (0.5 * h).abs())
    torch.testing.assert_close(net(x), expected)
    alone = patch(nn.LayerNorm(D), norm="softsign")
    torch.testing.assert_close(alone(x), (0.5 * x) / (1 + (0.5 * x).abs()))
    assert PatchConfig.from_json(PatchConfig(branches=["softsign"]).to_json()).branches == ["softsign"]


def test_the_registry_refuses_what_would_confuse(registry):
    with pytest.raises(ConfigError, match="already registered"):
        register_branch("dyt")(type("Other", (Branch,), {}))
    with pytest.raises(ConfigError, match="choose another name"):
        register_branch("autonorm")(type("Other", (Branch,), {}))
    with pytest.raises(ConfigError, match="subclass of hf_autonorm.nn.Branch"):
        register_branch("other")(nn.Linear)
    with pytest.raises(ConfigError, match="subclass of hf_autonorm.nn.Branch"):
        register_branch("other")(lambda norm: norm)
    with pytest.raises(ConfigError, match=r'@register_branch\("linear"\)'):
        register_branch(nn.Linear)  # the parentheses forgotten
    with pytest.raises(ConfigError, match=r"must define curve\(self, z\)"):
        register_branch("other")(type("Other", (PointwiseBranch,), {"forward": lambda self, x, mask=None: x}))
    with pytest.raises(ConfigError, match=r"must define forward\(self, x, mask=None\)"):
        register_branch("other")(type("Other", (Branch,), {}))
    forward = {"forward": lambda self, x, mask=None: x}
    with pytest.raises(ConfigError, match="must be a PointwiseBranch"):
        register_branch("other")(type("Other", (Branch,), {**forward, "pointwise": True}))
    assert "other" not in registry
    cls = type("Other", (Branch,), forward)
    assert register_branch("other")(cls) is cls and register_branch("other")(cls) is cls  # a notebook cell run again


@pytest.mark.parametrize("name", ["", " ", "a.b", "a,b", "1st", "-x", 5, None, "norm", "none", "autonorm", "dyt"])
def test_a_name_that_would_not_come_back_is_refused(registry, name):
    """Names stand in configs (JSON), in module names, in comma-separated lists and beside "norm" in reports."""
    before = dict(registry)
    with pytest.raises(ConfigError, match="word of letters|choose another name"):
        register_branch(name)(type("Other", (Branch,), {"forward": lambda self, x, mask=None: x}))
    assert registry == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", sorted(BRANCHES))
def test_what_is_no_number_stays_visible_in_its_token(name, bad):
    """NaN gives NaN; an infinite value what the docstring says; no other token changes where none is pooled."""
    with torch.no_grad():
        branch = BRANCHES[name](nn.LayerNorm(D))
        branch.reset_parameters(torch.Generator().manual_seed(0))
        x = torch.randn(2, 3, D)
        spoilt = x.clone()
        spoilt[1, 1, 2] = bad
        clean, dirty = branch(x), branch(spoilt)
    assert torch.equal(dirty[0], clean[0])  # another sequence
    if not branch.pools_sequence:
        assert torch.equal(dirty[1, [0, 2]], clean[1, [0, 2]])
    value = dirty[1, 1, 2]
    if bad == bad and name in ("dyt", "derf"):
        assert value == math.copysign(1, bad)
    elif bad == bad and name == "identity":
        assert value == bad
    else:
        assert value.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", [-1, 1])
def test_dynamic_tanh_alone(axis, dtype):
    layer = DynamicTanh(D, axis, alpha=0.7).to(dtype)
    with torch.no_grad():
        layer.weight.normal_(), layer.bias.normal_()
    x = torch.randn(2, D, 3, D).to(dtype)
    weight, bias = (p.view(-1, 1, 1) if axis == 1 else p for p in (layer.weight.double(), layer.bias.double()))
    expected = weight * torch.tanh(layer.alpha.double() * x.double()) + bias
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol={torch.bfloat16: 0.05}.get(dtype, 1e-5))
    assert DynamicTanh(D, bias=False).bias is None
