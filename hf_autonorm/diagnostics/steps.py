"""The activation step of an affine layer in one SGD step, and how it lies to the gradient (arXiv 2512.22247)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.affine import AffineLike, Correction
from ..nn.patchnorm import PatchNorm, innermost
from ..patching.batches import first_input
from ..patching.fit_gain import valid_rows


@dataclass(frozen=True)
class DivergenceRow:
    """One affine layer. All numbers are of one SGD step on one batch, averaged over the batches.

    The factor of a sample (a token, or a position of a convolution's output) is how far the step that it causes alone
    moves its own output, in units of −ηδ: ‖x‖² + 1 in an affine layer. Padding tokens are left out of it.
    """

    name: str
    layer: str  # class, or form where corrected
    factor: float  # mean
    spread: float  # standard deviation of the factor over its mean
    divergence: float  # sine of the angle between the samples' own steps and −Δ: what no learning rate can mend
    cosine: float  # between the whole step, interference included, and −Δ
    scale: float  # of the whole step along −Δ, in units of η
    interference: float  # ‖part of the step that other samples cause‖ / ‖the samples' own part‖


def activation_steps(module: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """−Δz/η of each call of an affine layer (or Correction) for one SGD step on its weight and bias: (XXᵀ + 1)Δ.

    Args:
        calls: (input, loss gradient at the output) of all calls that the step is made of. The inputs stay as they are:
            what layers before this one do with the same step is not this layer's.

    Returns tensors of the outputs' shapes, in fp32 or the calls' wider type.
    """
    inner = innermost(module.original if isinstance(module, Correction) else module)
    own = {id(p) for p in (inner.weight, inner.bias) if p is not None}
    wide = torch.promote_types(calls[0][1].dtype, torch.float32)
    weights = {n: p.detach().to(wide).requires_grad_() for n, p in module.named_parameters() if id(p) in own}
    step = {n: torch.zeros_like(p, requires_grad=False) for n, p in weights.items()}
    run = torch.func.functional_call
    for x, delta in calls:
        with torch.enable_grad():
            z = run(module, weights, (x.to(wide),))
            gradients = torch.autograd.grad(z, list(weights.values()), delta.to(wide))
        for total, gradient in zip(step.values(), gradients):
            total += gradient
    with torch.no_grad():
        moved = [run(module, step, (x.to(wide),)) for x, _ in calls]
        if isinstance(module, Correction) and module.original is not inner:  # LoRA adds what is no part of the step
            nothing = {n: torch.zeros_like(p) for n, p in step.items()}
            moved = [m - run(module, nothing, (x.to(wide),)) for m, (x, _) in zip(moved, calls)]
    return moved


class LayerWatch:
    """One affine layer: takes the inputs of its calls and the gradients of its outputs, and adds up the numbers."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.correction = module if isinstance(module, Correction) else _uncorrected(module)
        self.mask: Tensor | None = None
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0
        self.busy = False
        self.batches = 0
        self.totals = torch.zeros(6, dtype=torch.float64)
        self.factors = [0.0, 0.0, 0.0]  # count, sum, sum of squares

    def called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor | None:
        if self.busy or not isinstance(output, Tensor) or not torch.is_grad_enabled():
            return None
        x = first_input(args, kwargs).detach()
        if not output.requires_grad:  # nothing before it has a gradient: begin here
            output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
        self.waiting += 1
        output.register_hook(lambda delta: self.returned(x, delta))
        return output

    def returned(self, x: Tensor, delta: Tensor) -> None:
        self.calls.append((x, delta.detach()))
        self.waiting -= 1
        if self.waiting == 0:  # a layer with several calls takes one step for all of them
            self.finish()

    def finish(self) -> None:
        """Adds the numbers of one batch, from all calls whose gradient came back."""
        calls, self.calls, self.waiting = self.calls, [], 0
        if not calls:
            return
        self.busy = True  # the module is called here, and its hooks run
        try:
            self._add(calls)
        finally:
            self.busy = False
        self.batches += 1

    @torch.no_grad()
    def _add(self, calls: list[tuple[Tensor, Tensor]]) -> None:
        for (x, delta), moved in zip(calls, activation_steps(self.module, calls)):
            x, delta = x.to(moved), delta.to(moved)
            factor = self.correction.step_factor(x).to(moved)
            own = factor * delta
            products = (
                (delta, delta), (moved, moved), (moved, delta), (own, delta), (own, own), (moved - own,) * 2,
            )  # fmt: skip
            self.totals += torch.stack([(a * b).sum(dtype=torch.float64) for a, b in products]).cpu()
            factor = valid_rows(factor, self.correction.channel_axis, self.mask)
            values = (factor.numel(), factor.sum().item(), factor.square().sum().item())
            self.factors = [a + b for a, b in zip(self.factors, values)]

    def row(self) -> DivergenceRow:
        deltas, moved, along, own_along, own, interference = self.totals.tolist()
        count, total, squares = self.factors
        mean = total / count
        aligned = _ratio(own_along, math.sqrt(own * deltas))
        corrected = isinstance(self.module, Correction)
        return DivergenceRow(
            name=self.name,
            layer=self.module.form if corrected else type(self.module).__name__,
            factor=mean,
            spread=_ratio(math.sqrt(max(0.0, squares / count - mean**2)), mean),
            divergence=math.sqrt(max(0.0, 1 - aligned**2)),
            cosine=_ratio(along, math.sqrt(moved * deltas)),
            scale=_ratio(along, deltas),
            interference=math.sqrt(_ratio(interference, own)),
        )


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _uncorrected(module: nn.Module) -> Correction:
    """The layer as a correction of strength 0, which knows how long the inputs are that it sees."""
    conv = hasattr(module, "kernel_size")
    return PatchNorm(module, strength=0.0) if conv else AffineLike(module, strength=0.0)
