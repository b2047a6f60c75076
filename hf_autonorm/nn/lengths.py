"""The length of an input, and the division by it, in any precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .wrapper import is_traced

# Below this the divisor counts as zero: its reciprocal, times a gradient, must stay a finite fp32 number.
_SMALLEST = 2.0**-106


# Between these a sum of squares in fp32 has neither overflown nor lost what matters.
_SAFE = (1e-30, 1e30)


class _SquaredNorm(torch.autograd.Function):
    """Σx² along an axis counted from the end; keeps only x for the backward pass, as the wrapped layer does."""

    @staticmethod
    def forward(x: Tensor, axis: int) -> Tensor:
        on_cpu = x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
        return _fast_squared_norm(x, axis) if on_cpu and x.dtype != torch.float64 else _plain_squared_norm(x, axis)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # 2·grad·x, in fp32: a length taken out of one factor and put into the other keeps both in range.
        x, squares = ctx.saved_tensors
        squares = squares.detach()
        length = torch.where(squares == 0, 1.0, squares).sqrt()
        wide = torch.promote_types(x.dtype, torch.float32)
        return ((2 * grad * length).to(wide) * (x / length.to(wide))).to(x.dtype), None

    @staticmethod
    def vmap(info, in_dims: tuple, x: Tensor, axis: int):
        return _SquaredNorm.apply(x.movedim(in_dims[0], 0), axis), 0  # `axis` is counted from the end


def _plain_squared_norm(x: Tensor, axis: int) -> Tensor:
    # Squares of half, bfloat16 and single precision numbers neither overflow nor vanish in float64, so no scaling by
    # max|x| is needed, which would also carry a NaN or inf of one patch to others.
    return x.to(_widest(x)).square().sum(axis, keepdim=True)


def _fast_squared_norm(x: Tensor, axis: int) -> Tensor:
    """The same on a CPU, where reading a value waits for nothing: fp32, and float64 for the rows that need it."""
    single = x.float()
    if single.stride(axis) == 1:
        squares = torch.linalg.vector_norm(single, dim=axis, keepdim=True).double().square()
    else:
        squares = single.square().sum(axis, keepdim=True).double()
    wrong = ~((squares > _SAFE[0]) & (squares < _SAFE[1]))
    if wrong.any():
        squares = squares.movedim(axis, -1).squeeze(-1)
        wrong = wrong.movedim(axis, -1).squeeze(-1)
        squares[wrong] = x.movedim(axis, -1)[wrong].double().square().sum(-1)
        squares = squares.unsqueeze(-1).movedim(-1, axis)
    return squares


def _widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def squared_norm(x: Tensor, axis: int = -1) -> Tensor:
    """Σx² along `axis` < 0 (kept, of size 1), in float64; twice differentiable everywhere."""
    return _plain_squared_norm(x, axis) if is_traced() else _SquaredNorm.apply(x, axis)


def divisor(squares: Tensor, constant: bool, strength: float | Tensor, gain: float | Tensor) -> Tensor:
    """(1 − λ) + λ·sqrt(squares + 1 or 0)/g, and 1 where that is zero."""
    if constant:
        length = torch.sqrt(squares + 1)
    else:
        zero = squares == 0  # the root has no derivative there; it counts as 0
        length = torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, squares)))
    d = (1 - strength) + strength * (length / gain)
    return torch.where(d < _SMALLEST, 1.0, d)


def vanishes(length: Tensor, strength: float, gain: float) -> Tensor:
    """Where `divisor` is 1 because its formula gives zero, or has no derivative."""
    return ((1 - strength) + strength * (length / gain) < _SMALLEST) | (length == 0)


def divide(y: Tensor, d: Tensor, *, in_place: bool = False) -> Tensor:
    """y/d in fp32 or y's wider type, rounded to y's dtype, laid out as y. `in_place`: y may be overwritten."""
    wide = torch.promote_types(y.dtype, torch.float32)
    if in_place and y.dtype == wide and not (is_traced() or torch.is_grad_enabled()):
        return y.div_(d.to(wide))
    quotient = (y / d.to(wide)).to(y.dtype)
    return quotient if quotient.stride() == y.stride() else torch.empty_like(y).copy_(quotient)
