"""What the gates do: weights and entropy per layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import NotPatchedError
from ..nn.autonorm import autonorms
from ..patching.record import wrappers
from ..tables import AsTable


@dataclass(frozen=True)
class GateRow:
    """One AutoNorm layer."""

    name: str
    weights: dict[str, float]  # by branch name, the original norm first, as "norm"
    entropy: float  # nats
    frozen: bool
    strength: float
    r2: dict[str, float] | None  # by branch name; None before calibration
    learns: bool = True  # False: the weights are constants, as where a branch replaces the norm


class Gates(AsTable, list):
    """Rows of `gates`; prints as a table, `.plot()` draws it."""

    def table(self):
        """A `rich.table.Table`."""
        from rich.table import Table

        names = list(dict.fromkeys(name for row in self for name in row.weights))
        count = sum(row.learns for row in self)
        titles = [f"{count} gates"] if count else []
        titles += [f"{len(self) - count} norms without a gate that learns"] if count < len(self) else []
        table = Table(title=", ".join(titles))
        table.add_column("module", overflow="fold")
        for column in (*(f"w({name})" for name in names), "entropy", "frozen", "strength", "R²"):
            table.add_column(column, justify="right")
        for row in self:
            weights = [f"{row.weights[n]:.4f}" if n in row.weights else "" for n in names]
            r2 = "" if row.r2 is None else " ".join(f"{value:.3f}" for value in row.r2.values())
            learned = [f"{row.entropy:.4f}", "yes" if row.frozen else "no"] if row.learns else ["", ""]
            table.add_row(row.name or "(the model itself)", *weights, *learned, f"{row.strength:g}", r2)
        return table

    def plot(self, path: str | None = None):
        """Weights (stacked) and entropy per layer; returns the matplotlib Figure, and writes it to `path` if given."""
        from .plots import plot_gates

        return plot_gates(self, path)


def gates(model: nn.Module, batches: Iterable[Any] | None = None) -> Gates:
    """Mean weights and entropy (in nats: −Σ w ln w) of every AutoNorm gate in `model`, at full strength.

    Without `batches`: of the last training forward (at the start: the initial ones). With them: over those batches,
    in eval mode. Returns rows (name, weights, entropy, frozen, strength, r2, learns).
    """
    patched = wrappers(model)
    layers = autonorms(model)
    if patched and not layers:
        raise NotPatchedError(
            f"no gates: {type(model).__name__} is patched, but its norms are not (norm=None); patch(model) adds them"
        )
    if not layers:
        raise NotPatchedError(f"{type(model).__name__} holds no AutoNorm layer; call patch(model) first")
    values = {name: layer.statistics.double() for name, layer in layers}
    if batches is not None:
        values = _over_batches(model, layers, batches)
    rows = Gates()
    for name, layer in layers:
        *weights, entropy = values[name].tolist()
        r2 = layer.r2.tolist()
        rows.append(
            GateRow(
                name=name,
                weights=dict(zip(("norm", *layer.branch_names), weights)),
                entropy=abs(entropy),  # rounding leaves -0.0
                frozen=layer.scalar("frozen") > 0,
                strength=layer.scalar("strength"),
                r2=None if max(r2) > 1 else dict(zip(layer.branch_names, r2)),
                learns=layer.bias_gate.learns,
            )
        )
    return rows


@torch.no_grad()
def _over_batches(model: nn.Module, layers, batches: Iterable[Any]) -> dict[str, torch.Tensor]:
    from ..patching.batches import as_batches, forward
    from ..patching.calibrate import undisturbed

    kept = {name: layer.statistics.clone() for name, layer in layers}
    totals = {name: torch.zeros_like(kept[name], dtype=torch.float64) for name, _ in layers}
    count = 0
    with undisturbed(model), contextlib.ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.statistics.copy_, kept[name])
            stack.enter_context(layer.recording())
        for batch in as_batches(batches):
            forward(model, batch)
            count += 1
            for name, layer in layers:
                totals[name] += layer.statistics
    return {name: total / max(count, 1) for name, total in totals.items()}
