"""AutoNorm's forward and hand-derived backward, as pure functions of tensors, and the autograd function around them.

One source of maths, two ways to run it: as they stand, op by op, or compiled by Inductor (`fused.py`). The autograd
function keeps x, the norm's statistics and the gate; whatever is as large as x is computed again in the backward pass.

Shapes: x is (N, D), tokens by channels. `keep` and `move`, (N, 1) or (1, 1), are what a token keeps of its norm and
gets of the branch: with gate w and strength λ, keep = 1 − λ(1 − w₀), move = λ w₁. Vectors over channels are (D,),
slope and shift (1,). All arithmetic is done in the dtype of `slope`: fp32, or fp64 where x is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# tanh(z)/z as P(z²)/Q(z²), a minimax fit of the relative error on |z| ≤ 8, beyond which tanh is ±1 to 2e-7: 4e-7 in
# fp32, at a quarter of the time of the correctly rounded function, which is what a fused layer would wait for.
_TANH_P = (
    0.9999999935863763,
    0.13444589121089906,
    3.5717079933030383e-3,
    2.1896568895174443e-5,
    1.5233332547770875e-8,
)
_TANH_Q = (1.0, 0.4677791645214366, 2.6164856587413066e-2, 3.4114756136447376e-4, 8.523576086004086e-7)


class Form(NamedTuple):
    """What is fixed when the functions are compiled."""

    curve: str  # key of CURVES
    centered: bool | None = None  # LayerNorm, RMSNorm, or None: no norm, the branch alone
    eps: float = 0.0
    offset: float = 0.0  # the norm scales by offset + its weight


def _horner(u: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = coefficients[-1] * u
    for c in coefficients[-2:0:-1]:
        total = (total + c) * u
    return total + coefficients[0]


def _tanh(z: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() or z.dtype != torch.float32 or z.device.type != "cpu":
        return torch.tanh(z)
    z = z.clamp(-8.0, 8.0)
    u = z * z
    curve = z * _horner(u, _TANH_P) / _horner(u, _TANH_Q)
    # Exactly ±1 at the ends: a last digit short, and the slope's gradient, times x, is anything where x is large.
    return torch.where(u >= 64.0, z * 0.125, curve)


def root_of_one_plus_square(z: Tensor) -> Tensor:
    """√(1 + z²), where z² may overflow: torch.hypot, in operations that ONNX and Inductor know."""
    larger = z.detach().abs().clamp(min=1)  # whatever it is, the value and its derivatives are the same
    return larger * torch.sqrt((z / larger).square() + larger.reciprocal().square())


def _isru(z: Tensor) -> Tensor:
    return z / root_of_one_plus_square(z)


# name of the branch → (curve of z, its derivative from z and the curve's value)
CURVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "dyt": (_tanh, lambda z, c: 1 - c * c),
    "derf": (torch.erf, lambda z, c: 2 / math.sqrt(math.pi) * torch.exp(-z * z)),
    "dyisru": (_isru, lambda z, c: root_of_one_plus_square(z) ** -3.0),
}


def _scale(norm_weight: Tensor | None, form: Form, dtype: torch.dtype) -> Tensor | float:
    if norm_weight is None:
        return 1.0
    scale = norm_weight.to(dtype)
    return scale + form.offset if form.offset else scale


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def mix_forward(
    x: Tensor,
    keep: Tensor,
    move: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor,
    shift: Tensor | None,
    form: Form,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """keep·norm(x) + move·(weight ⊙ curve(slope·x + shift) + bias), x's mean (N, 1) (None where the norm takes none
    away) and 1/σ (N, 1). Differentiable, to any order."""
    dtype = slope.dtype
    wide = x.to(dtype)
    curve = CURVES[form.curve][0](_plus(wide * slope, shift))
    branch = _plus(curve * weight.to(dtype), bias)
    if form.centered is None:
        return branch.to(x.dtype), None, None
    if form.centered:
        n, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], None, None, form.eps)
    else:
        mean, rstd = None, torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
        n = wide * rstd
    norm = _plus(n * _scale(norm_weight, form, dtype), norm_bias)
    return (keep * norm + move * branch).to(x.dtype), mean, rstd


class Gradients(NamedTuple):
    """What `mix_backward` returns; None where there is no such input. slope and shift are (N, 1), still to be summed:
    one sum over all of x would lose digits."""

    x: Tensor
    keep: Tensor | None
    move: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None
    slope: Tensor
    shift: Tensor | None


def mix_backward(
    grad: Tensor,
    x: Tensor,
    keep: Tensor,
    move: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor,
    shift: Tensor | None,
    form: Form,
) -> Gradients:
    """The gradients of `mix_forward` for the gradient `grad` of its first result; x's has x's dtype."""
    dtype, width = slope.dtype, x.shape[-1]
    g, wide = grad.to(dtype), x.to(dtype)
    curve_of, derivative = CURVES[form.curve]
    z = _plus(wide * slope, shift)
    curve = curve_of(z)
    through_weight = g * weight.to(dtype)
    inner = through_weight * derivative(z, curve)
    alone = form.centered is None
    moved = g if alone else move * g
    inner = inner if alone else move * inner
    d_x = inner * slope
    d_slope = (inner * wide).sum(-1, keepdim=True)
    d_shift = None if shift is None else inner.sum(-1, keepdim=True)
    d_weight, d_bias = (moved * curve).sum(0), None if bias is None else moved.sum(0)
    if alone:
        return Gradients(d_x.to(x.dtype), None, None, None, None, d_weight, d_bias, d_slope, d_shift)
    # For n = (x − μ)/σ and h = ∂L/∂n: ∂L/∂x = (h − mean(h) − n·mean(h·n))/σ; without the middle term where the mean
    # stays in.
    n = (wide - mean) * rstd if form.centered else wide * rstd
    h = g * _scale(norm_weight, form, dtype)
    along = (h * n).sum(-1, keepdim=True)
    level = h.sum(-1, keepdim=True) / width if form.centered else 0.0
    d_x = d_x + (keep * rstd) * (h - level - n * (along / width))
    d_keep = along if norm_bias is None else along + (g * norm_bias.to(dtype)).sum(-1, keepdim=True)
    d_move = through_weight * curve
    d_move = (d_move if bias is None else d_move + g * bias.to(dtype)).sum(-1, keepdim=True)
    kept = keep * g
    return Gradients(
        d_x.to(x.dtype),
        d_keep,
        d_move,
        None if norm_weight is None else (kept * n).sum(0),
        None if norm_bias is None else kept.sum(0),
        d_weight,
        d_bias,
        d_slope,
        d_shift,
    )


class Engine:
    """The two functions above, or what stands in for them."""

    def __init__(
        self,
        forward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]],
        backward: Callable[..., Gradients],
    ) -> None:
        self.forward, self.backward = forward, backward


EAGER = Engine(mix_forward, mix_backward)


class Draw(NamedTuple):
    """How the weights come out of a selector's logits."""

    hard: bool = False  # one-hot in the forward pass, the gradient of the soft sample (straight-through)
    tau: float = 1.0  # temperature; read where there is noise
    frozen: bool = False  # the selector's parameters get a gradient of zero


def soft_weights(logits: Tensor, noise: Tensor | None, tau: float) -> Tensor:
    """softmax(logits), or with Gumbel noise softmax((logits + noise)/τ); (…, K+1)."""
    return F.softmax(logits if noise is None else (logits + noise) / tau, dim=-1)


def one_hot(soft: Tensor) -> Tensor:
    """The largest weight of each row as 1, the others 0, in soft's dtype."""
    return F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)


def _logits(x: Tensor, selector: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w_in, b_in, w_out, b_out = (p.to(dtype) for p in selector)
    hidden = torch.relu(F.linear(x.to(dtype), w_in, b_in))
    return hidden, F.linear(hidden, w_out, b_out)


def _portions(weights: Tensor, strength: float | Tensor) -> tuple[Tensor, Tensor]:
    """keep and move from (N or 1, 2) weights."""
    return 1 - strength * (1 - weights[:, :1]), strength * weights[:, 1:]


class MixFunction(torch.autograd.Function):
    """AutoNorm with one pointwise branch. x: (…, D), any strides; the result is contiguous.

    The gate is `weights`, (N or 1, 2), or, where that is None, a token selector (`selector`: w_in, b_in, w_out, b_out)
    whose matrix product runs on the same x, so that its gradient is added in place. Also returns log p, (N, 2), of the
    selector without noise, or None; it has no gradient. `idle` parameters receive zeros: DDP waits for all.
    """

    @staticmethod
    def forward(
        ctx, engine: Engine, form: Form, draw: Draw, strength: float | Tensor, noise, weights, x, *tensors
    ) -> tuple[Tensor, Tensor | None]:
        mix, selector, idle = tensors[:6], tensors[6:10], tensors[10:]
        slope = mix[4]
        rows = x.reshape(-1, x.shape[-1])
        hidden = soft = log_p = None
        used = weights
        if selector[0] is not None:
            hidden, logits = _logits(rows, selector, slope.dtype)
            log_p, soft = F.log_softmax(logits, dim=-1), soft_weights(logits, noise, draw.tau)
            used = one_hot(soft) if draw.hard else soft
            ctx.mark_non_differentiable(log_p)
        keep, move = (None, None) if used is None else _portions(used, strength)
        y, mean, rstd = engine.forward(rows, keep, move, *mix, form)
        ctx.save_for_backward(x, *mix, *selector, noise, weights, mean, rstd, hidden, soft)
        ctx.engine, ctx.form, ctx.draw, ctx.strength = engine, form, draw, strength
        ctx.idle = [(p.shape, p.dtype, p.device) for p in idle]
        ctx.set_materialize_grads(False)
        # A view would forbid the in-place additions that models do on a norm's output.
        return torch.ops.aten._unsafe_view(y, x.shape), log_p

    @staticmethod
    def backward(ctx, grad: Tensor | None, _):
        idle = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.idle]
        if grad is None:
            return (None,) * 17 + tuple(idle)
        with torch.autocast(grad.device.type, enabled=False):
            found = _differentiable(ctx, grad) if torch.is_grad_enabled() else _first_order(ctx, grad)
        return (None,) * 5 + found + tuple(idle)


def _first_order(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for weights, x, mix and selector."""
    x, *rest = ctx.saved_tensors
    mix, selector, (noise, weights, mean, rstd, hidden, soft) = rest[:6], rest[6:10], rest[10:]
    rows = x.reshape(-1, x.shape[-1])
    used = weights if soft is None else (one_hot(soft) if ctx.draw.hard else soft)
    keep, move = (None, None) if used is None else _portions(used, ctx.strength)
    engine = EAGER if _batched() else ctx.engine
    found = engine.backward(grad.reshape(rows.shape), rows, keep, move, mean, rstd, *mix, ctx.form)
    d_weights, d_selector = None, (None,) * 4
    if soft is not None:
        d_used = ctx.strength * torch.cat([found.keep, found.move], 1)
        d_selector = _selector_backward(d_used, found.x, rows, selector, hidden, soft, noise is not None, ctx.draw)
    elif weights is not None and ctx.needs_input_grad[5]:
        d_weights = ctx.strength * torch.cat([found.keep, found.move], 1)
        d_weights = d_weights if len(weights) == len(rows) else d_weights.sum(0, keepdim=True)
    d_mix = found[3:7] + tuple(None if d is None else d.sum(0) for d in found[7:])
    d_mix = tuple(None if d is None else d.to(p.dtype) for d, p in zip(d_mix, mix))
    return d_weights, found.x.view(x.shape), *d_mix, *d_selector


def _batched() -> bool:
    """Whether several gradients go through the backward pass at once (`is_grads_batched`, `torch.func.vmap`)."""
    return torch._C._dispatch_tls_is_dispatch_key_included("VmapMode") or torch._C._are_functorch_transforms_active()


def _selector_backward(
    d_used: Tensor,
    d_x: Tensor,
    rows: Tensor,
    selector: list[Tensor],
    hidden: Tensor,
    soft: Tensor,
    noisy: bool,
    draw: Draw,
) -> tuple[Tensor, ...]:
    """The gradients of the selector's parameters; x's share is added to `d_x` in place."""
    w_in, _, w_out, _ = (p.to(soft.dtype) for p in selector)
    d_logits = soft * (d_used - (d_used * soft).sum(-1, keepdim=True))
    d_logits = d_logits / draw.tau if noisy else d_logits
    d_hidden = (d_logits @ w_out) * (hidden > 0)
    if d_x.dtype == w_in.dtype and not _batched():
        d_x.addmm_(d_hidden, w_in)
    else:
        d_x.add_(d_hidden @ w_in)
    if draw.frozen:
        return tuple(torch.zeros_like(p) for p in selector)
    found = (d_hidden.t() @ rows.to(soft.dtype), d_hidden.sum(0), d_logits.t() @ hidden, d_logits.sum(0))
    return tuple(d.to(p.dtype) for d, p in zip(found, selector))


def _differentiable(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for weights, x, mix and selector as functions of all of them, for a second derivative."""
    x, *rest = ctx.saved_tensors
    inputs = [rest[11], x, *rest[:10]]
    # Aliases: the derivative asked for is the one past this layer, not the one through what x was computed from.
    inputs = [None if t is None else t.view_as(t) for t in inputs]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    weights, x, *rest = inputs
    mix, selector, noise, draw = rest[:6], rest[6:], ctx.saved_tensors[11], ctx.draw
    rows = x.reshape(-1, x.shape[-1])
    if selector[0] is not None:
        own = tuple(p.detach() if draw.frozen else p for p in selector)
        soft = soft_weights(_logits(rows, own, mix[4].dtype)[1], noise, draw.tau)
        weights = one_hot(soft) + (soft - soft.detach()) if draw.hard else soft
    keep, move = (None, None) if weights is None else _portions(weights, ctx.strength)
    y = mix_forward(*[rows, keep, move, *mix, ctx.form])[0]
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if y.requires_grad:  # not so where nothing but a frozen selector learns
        grads = torch.autograd.grad(y, wanted, grad.reshape(y.shape), create_graph=True, allow_unused=True)
    left = iter(grads)
    found = [next(left) if t is not None and t.requires_grad else None for t in inputs]
    zero = draw.frozen and selector[0] is not None
    return tuple(found[:8]) + tuple(torch.zeros_like(p) if zero else d for p, d in zip(selector, found[8:]))
