"""Affine-like and norm-like linear layers as one autograd function: it keeps what the linear layer keeps, x.

For z = (W x + b)/d the gradient of d is −⟨∂L/∂z, z⟩/d. With y' = ∂L/∂z / d, ⟨y', W x + b⟩ = ⟨Wᵀy', x⟩ + ⟨y', b⟩, and
Wᵀy' is needed for x's gradient anyway: the output of the linear layer is not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .lengths import divide, divisor, squared_norm, vanishes


class CorrectedLinear(torch.autograd.Function):
    """(x Wᵀ + b)/d, or x Wᵀ/d + b where not `constant` (the constant 1 is no part of the length then).

    x: (…, in), any strides, of W's dtype; W: (out, in); b: (out,) or None. Returns (…, out).
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, constant: bool, strength: float, gain: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        squares = squared_norm(rows)
        d = divisor(squares, constant, strength, gain)
        y = torch.addmm(bias, rows, weight.t()) if constant else rows @ weight.t()
        y = divide(y, d, in_place=True)
        if bias is not None and not constant:
            y += bias
        ctx.save_for_backward(x, weight, bias, squares)
        ctx.constant, ctx.strength, ctx.gain = constant, strength, gain
        # A view would forbid the in-place activations that models put behind a linear layer.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.autocast(grad.device.type, enabled=False):
            found = _differentiable_linear(ctx, grad) if torch.is_grad_enabled() else _linear_backward(ctx, grad)
        return (*found, None, None, None)


def _linear_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, squares = ctx.saved_tensors
    rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, len(weight))
    wide = torch.promote_types(x.dtype, torch.float32)
    d = divisor(squares, ctx.constant, ctx.strength, ctx.gain)
    scaled = divide(grad, d)
    d_weight = scaled.t() @ rows if ctx.needs_input_grad[1] else None
    d_bias = None if bias is None else (scaled if ctx.constant else grad).sum(0)
    if not ctx.needs_input_grad[0]:
        return None, d_weight, d_bias
    d_x = scaled @ weight
    along = (d_x.to(wide) * rows.to(wide)).sum(-1, keepdim=True).double()
    if ctx.constant:
        along = along + (scaled @ bias).unsqueeze(-1)
    length = torch.sqrt(squares + 1 if ctx.constant else squares)
    # Where the divisor counts as 1 for being too small, or the length has no derivative, nothing comes through it.
    d_length = torch.where(vanishes(length, ctx.strength, ctx.gain), 0.0, -ctx.strength / ctx.gain * along / d)
    # The derivative of the length is a unit vector; a quotient of the two factors alone could leave fp32's range.
    unit = rows / torch.where(length == 0, 1.0, length).to(wide)
    return (d_x + d_length.to(wide) * unit).to(x.dtype).view(x.shape), d_weight, d_bias


def _differentiable_linear(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for x, weight and bias as functions of them, for a second derivative."""
    # Aliases: the derivative asked for is the one past this layer, not the one through what x was computed from.
    x, weight, bias = inputs = [None if t is None else t.view_as(t) for t in ctx.saved_tensors[:3]]
    d = divisor(squared_norm(x), ctx.constant, ctx.strength, ctx.gain)
    y = divide(F.linear(x, weight, bias if ctx.constant else None), d)
    y = y if bias is None or ctx.constant else y + bias
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)
