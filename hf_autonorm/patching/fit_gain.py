"""The gain of affine-like and norm-like layers, fitted to a pretrained model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..nn.affine import Correction


def fit_gain(layer: Correction, calls: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[float, float] | None:
    """Sets g by least squares at full strength, on the part of the output that g multiplies.

    Args:
        calls: (input, wanted output, mask of the valid tokens or None) of each call on the calibration batches.

    Returns (R², gain), or None where no call had a finite value. Where least squares would turn the output's sign, the
    gain keeps its length instead.
    """
    uy = uu = vv = total = 0.0
    wanted_sum, count = 0.0, 0
    for x, y, valid in calls:
        u, c = layer.parts(x)
        rows = [valid_rows(t, layer.channel_axis, valid) for t in (u, y - c, y)]
        finite = torch.stack([r.isfinite().all(-1) for r in rows]).all(0)
        u, v, y = (r[finite] for r in rows)
        uy, uu, vv = uy + (u * v).sum().item(), uu + u.square().sum().item(), vv + v.square().sum().item()
        total, count, wanted_sum = total + y.square().sum().item(), count + len(y), wanted_sum + y.sum(0)
    if not count or not uu > 0 or not vv > 0:
        return None
    gain = uy / uu if uy > 0 else math.sqrt(vv / uu)
    layer.set_scalar("gain", gain)
    left = max(vv - 2 * gain * uy + gain * gain * uu, 0.0)
    spread = total - (wanted_sum.square().sum() / count).item()
    return (1 - left / spread if spread > 0 else (1.0 if left == 0 else 0.0)), gain


def valid_rows(x: Tensor, axis: int, mask: Tensor | None) -> Tensor:
    """(tokens, channels) in float64, without padding."""
    x = x.movedim(axis, -1)
    if mask is not None and x.dim() >= 3 and x.shape[:2] == mask.shape:
        x = x[mask.to(x.device)]
    elif mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        x = x[mask.to(x.device).flatten()]
    return x.reshape(-1, x.shape[-1]).double()
