"""The gain of affine-like and norm-like layers, fitted to a pretrained model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nn.affine import Correction

_STEPS = 32
_RATE = 0.1  # the first step of Adam on log g; it falls to 0


class RunningR2:
    """1 − Σ(y − ŷ)²/Σ(y − ȳ)² over all positions and channels, added up batch by batch in float64."""

    def __init__(self) -> None:
        self.left = self.squares = 0.0
        self.sums: Any = 0.0  # by channel, once a row has come
        self.count = 0

    def add(self, estimate: Tensor, y: Tensor) -> None:
        """Both (positions, channels) in float64; positions with a value that is not finite are left out."""
        finite = estimate.isfinite().all(-1) & y.isfinite().all(-1)
        estimate, y = estimate[finite], y[finite]
        self.left += (y - estimate).square().sum().item()
        self.squares += y.square().sum().item()
        self.sums, self.count = self.sums + y.sum(0), self.count + len(y)

    def value(self) -> float:
        if not self.count:
            return 0.0
        spread = self.squares - (self.sums.square().sum() / self.count).item()
        return 1 - self.left / spread if spread > 0 else (1.0 if self.left == 0 else 0.0)


def fit_gain(layer: Correction, calls: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[float, float] | None:
    """Sets g by least squares at full strength, on the part of the output that g multiplies.

    Args:
        calls: (input, wanted output, mask of the valid tokens or None) of each call on the calibration batches.

    Returns (R², gain), or None where no call had a finite value. Where least squares would turn the output's sign, the
    gain keeps its length instead.
    """
    uy = uu = vv = 0.0
    for u, v, _, _ in _parts(layer, calls):
        uy, uu, vv = uy + (u * v).sum().item(), uu + u.square().sum().item(), vv + v.square().sum().item()
    if not (uu > 0 and vv > 0):
        return None
    gain = uy / uu if uy > 0 else math.sqrt(vv / uu)
    layer.set_scalar("gain", gain)
    fit = RunningR2()
    for u, _, c, y in _parts(layer, calls):
        fit.add(gain * u + c, y)
    return fit.value(), gain


def _parts(layer: Correction, calls: list[tuple[Tensor, Tensor, Tensor | None]]):
    """Rows (u, y − c, c, y) for each call, where the layer gives g·u + c and should give y."""
    for x, y, mask in calls:
        u, c = layer.parts(x)
        u, v, y = (valid_rows(t, layer.channel_axis, mask) for t in (u, y - c, y))
        finite = u.isfinite().all(-1) & y.isfinite().all(-1)
        yield u[finite], v[finite], (y - v)[finite], y[finite]


def tune_gains(
    layers: list[Correction],
    run: Callable[[int], Tensor | None],
    wanted: list[Tensor | None],
    masks: list[Tensor | None],
) -> None:
    """Moves all gains together so that the model's output comes closer to the original's, by Adam on their logarithms.

    Layer after layer, each fit sees what the layers before it got wrong and shrinks what it passes on (least squares
    under a noisy input does); only the output knows what that costs. A handful of numbers cannot overfit: they are as
    good on unseen text. Ends where it began if that was better.

    Args:
        run: the model's output on the batch of this index, at full strength.
        wanted, masks: the original model's output and the mask of the valid tokens, for each batch.
    """
    start = torch.tensor([layer.scalar("gain") for layer in layers], dtype=torch.float64)
    logs = start.log().requires_grad_()
    optimizer = torch.optim.Adam([logs], lr=_RATE)
    usable = [i for i, target in enumerate(wanted) if target is not None]

    def loss(index: int) -> Tensor | None:
        output = run(index)
        target = wanted[index]
        if output is None or target is None or output.shape != target.shape:
            return None
        y, t = (valid_rows(rows, -1, masks[index]) for rows in (output, target))
        keep = y.isfinite().all(-1) & t.isfinite().all(-1)
        return (y[keep] - t[keep]).square().sum() / t[keep].square().sum().clamp(min=torch.finfo(t.dtype).tiny)

    def total() -> float:
        losses = [loss(i) for i in usable]
        return math.fsum(float(value) for value in losses if value is not None)

    with torch.no_grad():
        before = total()
    for step in range(_STEPS if usable else 0):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / _STEPS)
        gradient = _gradient(layers, functools.partial(loss, usable[step % len(usable)]))
        if gradient is None:
            break
        logs.grad = gradient.to(logs) * logs.detach().exp()
        optimizer.step()
        _write(layers, logs.detach().exp())
    with torch.no_grad():
        if not total() < before:
            _write(layers, start)


def _gradient(layers: list[Correction], loss: Callable[[], Tensor | None]) -> Tensor | None:
    """d loss / d gains, or None where there is none. No other gradient is touched."""
    gains = [layer.gain.requires_grad_() for layer in layers]
    try:
        with torch.enable_grad():
            value = loss()
            if value is None or not value.requires_grad:
                return None
            gradients = torch.autograd.grad(value, gains, allow_unused=True)
    finally:
        for gain in gains:
            gain.requires_grad_(False)
    flat = torch.stack([torch.zeros(()) if g is None else g.detach().sum().cpu() for g in gradients])
    return flat if flat.isfinite().all() else None


def _write(layers: list[Correction], gains: Tensor) -> None:
    for layer, gain in zip(layers, gains.tolist()):
        layer.set_scalar("gain", gain)


def valid_rows(x: Tensor, axis: int, mask: Tensor | None) -> Tensor:
    """(tokens, channels) in float64, without padding."""
    x = x.movedim(axis, -1)
    if mask is not None and x.dim() >= 3 and x.shape[:2] == mask.shape:
        x = x[mask.to(x.device)]
    elif mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        x = x[mask.to(x.device).flatten()]
    return x.reshape(-1, x.shape[-1]).double()
