"""Dytness: how well Dynamic Tanh can stand in for a norm (arXiv 2503.10622)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PatchConfig
from ..nn.autonorm import AutoNorm
from ..nn.branches import BRANCHES
from ..patching.batches import first_input
from ..patching.fit_branch import fit_pointwise
from ..patching.fit_gain import valid_rows
from ..patching.targets import find_targets


@dataclass(frozen=True)
class DytnessRow:
    """One norm: how well γ⊙tanh(αx) + β, fitted, stands in for it on its own inputs."""

    name: str
    layer: str
    r2: float
    alpha: float


def norms_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, int]]:
    """(name, module that is called, the norm itself, channel axis) of every norm that a patch wraps or could wrap."""
    for target in find_targets(model, PatchConfig()):
        if isinstance(target.module, AutoNorm):
            yield target.name, target.module, target.module.original, target.module.channel_axis
        elif target.traits is not None:
            yield target.name, target.module, target.module, target.traits.channel_axis


class NormWatch:
    """One norm: takes a sample of its inputs and outputs."""

    def __init__(self, name: str, module: nn.Module, norm: nn.Module, channel_axis: int, quota: int) -> None:
        self.name, self.module, self.norm, self.channel_axis, self.quota = name, module, norm, channel_axis, quota
        self.mask: Tensor | None = None
        self.x: list[Tensor] = []
        self.y: list[Tensor] = []
        self.busy = False

    @torch.no_grad()
    def called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.busy:
            return
        x = first_input(args, kwargs)
        if self.norm is not module:
            self.busy = True
            output = self.norm(x)
            self.busy = False
        x, y = (valid_rows(t, self.channel_axis, self.mask) for t in (x.detach(), output.detach()))
        finite = x.isfinite().all(-1) & y.isfinite().all(-1)
        some = slice(None, None, max(1, -(-len(x) // self.quota)))
        self.x.append(x[finite][some].clone())
        self.y.append(y[finite][some].clone())

    @torch.no_grad()
    def row(self) -> DytnessRow:
        branch = BRANCHES["dyt"](self.norm, device=self.x[0].device, dtype=torch.float64)
        branch.reset_parameters()
        r2 = fit_pointwise(branch, torch.cat(self.x), torch.cat(self.y))
        return DytnessRow(self.name, type(self.norm).__name__, r2, float(branch.slope()))
