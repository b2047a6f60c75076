"""A branch fitted to the norm it may stand in for: α by search, scale and shift per channel in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn.autonorm import AutoNorm
from ..nn.branches import Branch

# α is searched where α·rms(x) lies between these: below, every curve is a straight line, above, a sign.
_ALPHA_RANGE = (1e-4, 30.0)
_SEARCH_TOKENS = 2048  # α needs no more; scale and shift are then solved on all tokens, in float64


@dataclass(frozen=True)
class FitRow:
    """How well one branch stands in for one layer's original, on the calibration batches."""

    name: str
    branch: str
    r2: float  # 1 − Σ(y − ŷ)²/Σ(y − ȳ)², summed over channels, y the original model's output at this layer
    alpha: float | None  # of pointwise branches
    gain: float | None = None  # of affine-like and norm-like layers (`branch` is their form)
    tokens: int | None = None  # how many the branch was fitted on


def fit_autonorm(layer: AutoNorm, name: str, x: Tensor, y: Tensor) -> list[FitRow]:
    """Fits the branches of one layer to targets y given inputs x, both (tokens, channels) in float64."""
    finite = x.isfinite().all(-1) & y.isfinite().all(-1)
    x, y = x[finite], y[finite]
    if len(x) < 2:
        return []
    rows = []
    for index, (branch_name, branch) in enumerate(zip(layer.branch_names, layer.bias_branches)):
        if branch.pointwise:
            r2 = fit_pointwise(branch, x, y)
        else:
            view = x.T[None] if branch.channel_axis == 1 else x[None]
            output = branch(view)[0]
            r2 = _r2((output.T if branch.channel_axis == 1 else output) - y, y)
        layer.r2[index] = r2
        alpha = float(branch.slope()) if branch.pointwise else None
        rows.append(FitRow(name, branch_name, r2, alpha, tokens=len(x)))
    if layer.bias_gate.learns and layer.gate.granularity != "layer" and not layer.bias_gate.weight_out.any():
        # The selector says nothing yet: scale its first layer so that hidden units see inputs of size one.
        size = x.square().mean(-1).sqrt().mean()
        weight = layer.bias_gate.weight_in
        wanted = (3 * layer.width) ** -0.5 / size.clamp(min=1e-12)  # nn.Linear's standard deviation, over the size
        weight.mul_(wanted / weight.double().square().mean().sqrt().clamp(min=1e-30))
    return rows


def fit_pointwise(branch: Branch, x: Tensor, y: Tensor) -> float:
    """α by search, weight and bias per channel in closed form; returns R² of the branch as it stands after it."""
    centered = branch.bias is not None

    def solve(alpha: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
        t = branch.curve(x * alpha)
        t_mean = t.mean(0) if centered else torch.zeros_like(t[0])
        y_mean = y.mean(0) if centered else torch.zeros_like(y[0])
        t, target = t - t_mean, y - y_mean
        weight = (t * target).sum(0) / t.square().sum(0).clamp(min=torch.finfo(t.dtype).tiny)
        return weight, y_mean - weight * t_mean, (target - weight * t).square().sum().item()

    some = slice(None, None, -(-len(x) // _SEARCH_TOKENS))
    some_x, some_y = x[some].float(), y[some].float()
    loss = lambda log_alpha: solve(math.exp(log_alpha), some_x, some_y)[2]  # noqa: E731
    size = x.square().mean().sqrt().item() or 1.0
    low, high = (math.log(a / size) for a in _ALPHA_RANGE)
    for _ in range(3):  # a coarse grid over log α, then twice a finer one between the neighbours of the best
        grid = torch.linspace(low, high, 13).tolist()
        best = min(range(13), key=[loss(g) for g in grid].__getitem__)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 12)]
    branch.set_slope(math.exp(grid[best]))
    weight, bias, _ = solve(branch.slope().item(), x, y)  # with α as rounded
    branch.weight.copy_(weight)
    if centered:
        branch.bias.copy_(bias)
    fitted = branch.curve(x * branch.slope()) * branch.weight.double()
    return _r2(y - (fitted + branch.bias.double() if centered else fitted), y)


def _r2(residual: Tensor, y: Tensor) -> float:
    """1 − Σ residual²/Σ(y − ȳ)², never above 1; a constant y counts as explained where the residual is zero."""
    left, total = residual.square().sum().item(), (y - y.mean(0)).square().sum().item()
    return 1 - left / total if total > 0 else (1.0 if left == 0 else 0.0)
