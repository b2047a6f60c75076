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

from ..errors import ConfigError, UnsupportedError
from ..nn.affine import Correction
from ..nn.autonorm import valid_tokens
from ..nn.patchnorm import innermost
from ..nn.wrapper import Wrapper
from ..patching.affine_targets import has_conv_forward, has_linear_forward
from ..patching.batches import as_batches, attention_mask, forward
from ..patching.calibrate import main_output, undisturbed
from ..tables import AsTable
from .dytness import DytnessRow, NormWatch, norms_of
from .steps import DivergenceRow, LayerWatch

_NORM_TOKENS = 1024  # of each norm, over all batches: enough to tell how well a curve fits


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
        layers.add_column("module", overflow="fold")  # a name that is cut is another module's, too
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
            norms.add_column(title, justify="left" if title in ("module", "norm") else "right", overflow="fold")
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
    watches = [LayerWatch(name, module) for name, module in _affine_layers(model)]
    if not watches:
        raise UnsupportedError(f"{type(model).__name__} holds no Linear, Conv1D or Conv1d/2d/3d layer to diagnose")
    norms: list[Any] = [NormWatch(*found, quota=-(-_NORM_TOKENS // len(batches))) for found in norms_of(model)]
    said, both = "", [*watches, *norms]
    with undisturbed(model), _without_parameter_gradients(model), contextlib.ExitStack() as stack:
        for watch in both:
            stack.callback(watch.module.register_forward_hook(watch.called, with_kwargs=True).remove)
        for batch in batches:
            mask = valid_tokens(attention_mask(model, batch))
            for watch in both:
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
        weight = inner._parameters.get("weight")
        known = has_linear_forward(inner) or has_conv_forward(inner)
        if known and weight is not None and weight.is_floating_point() and weight.element_size() > 1:
            yield name, module


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
