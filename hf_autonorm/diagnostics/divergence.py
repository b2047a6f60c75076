"""Where a model's own steps diverge from the gradient: the instrument of the Affine Divergence (arXiv 2512.22247).

An affine layer z = W x + b takes, on one SGD step, activation steps that are not the ones the gradient asks for. With
the inputs of a batch in the rows of X and δ = ∂L/∂z in those of Δ, the step is −η(XXᵀ + 1)Δ, not −ηΔ. The Gram matrix
XXᵀ + 1 has ‖x‖² + 1 on its diagonal (each sample's own step, too large by a factor of its own) and the interference
of the samples beside it. The Gram matrix itself is never held: (XXᵀ + 1)Δ is X(XᵀΔ) + 1(1ᵀΔ), and XᵀΔ has the shape
of the weight, for any number of tokens; convolutions and corrected layers go the same way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PatchConfig
from ..errors import ConfigError, UnsupportedError
from ..nn.affine import AffineLike, Correction
from ..nn.autonorm import AutoNorm, valid_tokens
from ..nn.branches import BRANCHES
from ..nn.patchnorm import PatchNorm, innermost
from ..nn.traits import NormTraits, measure
from ..nn.wrapper import Wrapper
from ..patching.affine_targets import is_conv1d
from ..patching.batches import as_batches, attention_mask, forward
from ..patching.calibrate import main_output, undisturbed
from ..patching.fit_branch import fit_pointwise
from ..patching.fit_gain import valid_rows
from ..patching.targets import find_targets
from ..tables import AsTable

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORM_TOKENS = 1024  # of each norm, over all batches: enough to tell how well a curve fits


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


@dataclass(frozen=True)
class DytnessRow:
    """One norm: how well γ⊙tanh(αx) + β, fitted, stands in for it on its own inputs."""

    name: str
    layer: str
    r2: float
    alpha: float


@dataclass
class Diagnosis(AsTable):
    """What `diagnose` saw: `layers` by falling divergence, `norms` by falling R². Prints as a table."""

    layers: list[DivergenceRow] = field(default_factory=list)
    norms: list[DytnessRow] = field(default_factory=list)
    loss: str = ""
    not_reached: list[str] = field(default_factory=list)  # never called, or no gradient comes back

    def table(self):
        """The two tables, as a `rich` group."""
        from rich.console import Group
        from rich.table import Table

        layers = Table(title=f"Divergence of {len(self.layers)} affine layers; loss: {self.loss}")
        layers.add_column("module")
        layers.add_column("layer")
        for title in ("‖x‖²+1", "spread", "divergence", "cosine", "scale", "interference"):
            layers.add_column(title, justify="right")
        for row in self.layers:
            numbers = (row.factor, row.spread, row.divergence, row.cosine, row.scale, row.interference)
            layers.add_row(row.name, row.layer, *(f"{number:.4g}" for number in numbers))
        if self.not_reached:
            layers.caption = f"not reached on these batches: {', '.join(self.not_reached)}"
        norms = Table(title="Dytness: how well Dynamic Tanh can stand in for a norm")
        for title in ("module", "norm", "R²", "α"):
            norms.add_column(title, justify="left" if title in ("module", "norm") else "right")
        for norm in self.norms:
            norms.add_row(norm.name, norm.layer, f"{norm.r2:.4f}", f"{norm.alpha:.4g}")
        return Group(layers, norms) if self.norms else layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        from dataclasses import asdict

        return asdict(self)

    def plot(self, path: str | None = None):
        """Divergence, factor and cosine of each layer, and the norms' R²; returns the matplotlib Figure."""
        from .plots import plot_diagnosis

        return plot_diagnosis(self, path)


def diagnose(model: nn.Module, batches: Iterable[Any], loss: Callable[[Any, Any], Tensor] | None = None) -> Diagnosis:
    """Ranks the affine layers of `model`, patched or not, by how far their SGD step is from −∂L/∂z.

    Each batch is one forward and one backward pass in eval mode (no dropout, no gate noise), plus, for each layer,
    one more forward and weight gradient; nothing is trained and no `.grad` is touched. Beside the activations that a
    training step holds, one layer's weight gradient is held at a time.

    Args:
        model: any model; Linear, Conv1D (GPT-2), Conv1d/2d/3d layers and their corrected forms are looked at, as if
            their weight and bias were trained. Norms are looked at for how well Dynamic Tanh would stand in for them.
        batches: dictionaries (`model(**batch)`), `(inputs, labels)` pairs, or tensors.
        loss: `loss(outputs, batch)` → a scalar. Default: the model's own loss where the batch has labels; cross
            entropy for `(inputs, labels)` with integer labels; else a random linear function of the output (with a
            fixed seed): the factors do not depend on it, cosines and interference do.

    Returns a Diagnosis: rows for layers and norms, printed as tables, drawn by `.plot()`.

    Raises ConfigError for no batch or a loss that is no differentiable scalar, UnsupportedError for a model without
    an affine layer.
    """
    batches = list(as_batches(batches))
    if not batches:
        raise ConfigError("diagnose got no batch; pass an iterable of model inputs, e.g. [tokenizer(texts, …)]")
    watches = [_LayerWatch(name, module) for name, module in _affine_layers(model)]
    if not watches:
        raise UnsupportedError(f"{type(model).__name__} holds no Linear, Conv1D or Conv1d/2d/3d layer to diagnose")
    norms = [_NormWatch(*found, quota=-(-_NORM_TOKENS // len(batches))) for found in _norms(model)]
    said = ""
    with undisturbed(model), _without_parameter_gradients(model), contextlib.ExitStack() as stack:
        for watch in (*watches, *norms):
            stack.callback(watch.module.register_forward_hook(watch.called, with_kwargs=True).remove)
        for batch in batches:
            mask = valid_tokens(attention_mask(model, batch))
            for watch in (*watches, *norms):
                watch.mask = mask
            with torch.enable_grad():
                value, said = _loss(model, batch, loss)
                value.backward()
            for watch in watches:
                watch.finish()
    rows = [watch.row() for watch in watches if watch.batches]
    return Diagnosis(
        layers=sorted(rows, key=lambda row: -row.divergence),
        norms=sorted((watch.row() for watch in norms if watch.x), key=lambda row: -row.r2),
        loss=said,
        not_reached=[watch.name for watch in watches if not watch.batches],
    )


# --- what is looked at -----------------------------------------------------------------------------------------------


def _affine_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Wrapper):
            inside.update(id(m) for m in module.modules() if m is not module)
        if id(module) in inside and not isinstance(module, Correction):
            continue
        inner = innermost(module.original) if isinstance(module, Correction) else module
        linear = is_conv1d(inner) or type(inner).forward is nn.Linear.forward
        conv = any(type(inner).forward is c.forward and type(inner)._conv_forward is c._conv_forward for c in _CONVS)
        weight = inner._parameters.get("weight")
        if (linear or conv) and weight is not None and weight.is_floating_point() and weight.element_size() > 1:
            yield name, module


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, NormTraits]]:
    """(name, the module that is called, the norm itself, what it does)."""
    for target in find_targets(model, PatchConfig(norm="dyt")):
        if isinstance(target.module, AutoNorm):
            yield target.name, target.module, target.module.original, measure(target.module.original)
        elif target.traits is not None:
            yield target.name, target.module, target.module, target.traits


def _loss(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> tuple[Tensor, str]:
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    output = forward(model, batch)
    said = "the given one" if loss is not None else "the model's own"
    value = loss(output, batch) if loss is not None else None
    if loss is None and isinstance(output, Mapping):
        value = output.get("loss")
    logits = main_output(output)
    if value is None and loss is None and pair and isinstance(batch[1], Tensor) and not batch[1].is_floating_point():
        value, said = nn.functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten()), "cross entropy"
    if value is None and loss is None and logits is not None:
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(logits.shape, generator=generator).to(logits)
        value, said = (logits * direction).sum() / math.sqrt(logits.numel()), "a random direction of the output"
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ConfigError(
            "diagnose needs a differentiable scalar loss; put labels into the batches or pass loss=lambda outputs, "
            f"batch: … (got {type(value).__name__} from {type(model).__name__})"
        )
    return value.squeeze(), said


@contextlib.contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Backward then computes the gradients of activations alone, and leaves every `.grad` as it is."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


# --- what is measured ------------------------------------------------------------------------------------------------


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


class _LayerWatch:
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
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
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


class _NormWatch:
    """One norm: takes a sample of its inputs and outputs."""

    def __init__(self, name: str, module: nn.Module, norm: nn.Module, traits: NormTraits, quota: int) -> None:
        self.name, self.module, self.norm, self.traits, self.quota = name, module, norm, traits, quota
        self.mask: Tensor | None = None
        self.x: list[Tensor] = []
        self.y: list[Tensor] = []
        self.busy = False

    @torch.no_grad()
    def called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.busy:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if self.norm is not module:
            self.busy = True
            output = self.norm(x)
            self.busy = False
        x, y = (valid_rows(t, self.traits.channel_axis, self.mask) for t in (x.detach(), output.detach()))
        finite = x.isfinite().all(-1) & y.isfinite().all(-1)
        some = slice(None, None, max(1, -(-len(x) // self.quota)))
        self.x.append(x[finite][some].clone())
        self.y.append(y[finite][some].clone())

    @torch.no_grad()
    def row(self) -> DytnessRow:
        branch = BRANCHES["dyt"](self.norm, self.traits, device=self.x[0].device, dtype=torch.float64)
        branch.reset_parameters()
        r2 = fit_pointwise(branch, torch.cat(self.x), torch.cat(self.y))
        return DytnessRow(self.name, type(self.norm).__name__, r2, float(branch.slope()))
