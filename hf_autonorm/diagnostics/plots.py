"""Pictures, drawn with matplotlib (imported here only)."""

from __future__ import annotations

import os
from typing import Any


def plot_gates(rows: list[Any], path: str | None = None):
    """Stacked weights and entropy per layer; see `Gates.plot`."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row.weights))
    figure = Figure(figsize=(max(6.0, 0.35 * len(rows) + 2), 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    below = [0.0] * len(rows)
    for name in names:
        heights = [row.weights.get(name, 0.0) for row in rows]
        top.bar(range(len(rows)), heights, bottom=below, label=name, width=0.85)
        below = [a + b for a, b in zip(below, heights)]
    top.set(ylabel="mean gate weight", ylim=(0, 1.02), title="Gates by layer")
    top.legend(loc="lower left", fontsize="small")
    bottom.bar(range(len(rows)), [row.entropy for row in rows], width=0.85, color="0.5")
    bottom.set(ylabel="entropy (nats)", xlabel="layer, in the model's order")
    bottom.set_xticks(range(len(rows)), _short([row.name for row in rows]), rotation=90, fontsize=6)
    return _finish(figure, path)


def plot_gate_history(history: list[dict[str, Any]], decision: dict[str, Any] | None = None, path: str | None = None):
    """Norm weight per layer and mean entropy over training, from `GateFreezeCallback.history`; a line at a freeze."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [entry["epoch"] for entry in history]
    names = list(history[0]["layers"]) if history else []
    for index, name in enumerate(names):
        shade = index / max(1, len(names) - 1)
        weights = [entry["layers"][name]["weights"][0] for entry in history]
        left.plot(epochs, weights, marker=".", lw=1, color=(0.1 + 0.8 * shade, 0.3, 0.9 - 0.8 * shade))
    entropies = [sum(v["entropy"] for v in e["layers"].values()) / len(e["layers"]) for e in history]
    right.plot(epochs, entropies, marker=".", color="black")
    left.set(
        xlabel="epoch", ylabel="weight of the original norm", title="Gates over training (first layer blue, last red)"
    )
    right.set(xlabel="epoch", ylabel="mean entropy (nats)", title="Gate entropy")
    if decision is not None:
        right.axhline(decision["threshold"], ls=":", color="0.4")
        if decision["frozen"]:
            for axes in (left, right):
                axes.axvline(decision["epoch"], ls="--", color="0.4")
    return _finish(figure, path)


def plot_diagnosis(diagnosis: Any, path: str | None = None, most: int = 40):
    """The `most` diverging layers, ranked, and the norms' R²; see `Diagnosis.plot`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rows, norms = diagnosis.layers[:most], diagnosis.norms[:most]
    heights = [max(1, len(rows)), *([max(1, len(norms))] if norms else [])]
    figure = Figure(figsize=(11, 2.2 + 0.19 * sum(heights)), layout="constrained")
    top, *bottom = figure.subfigures(len(heights), 1, height_ratios=[4 + h for h in heights], squeeze=False)[:, 0]
    panels = (
        ("divergence", "divergence (sine of the angle that\nno learning rate mends)", "linear"),
        ("factor", "‖x‖²+1: mean, and one standard deviation", "log"),
        ("cosine", "cosine of the whole step with −∂L/∂z", "linear"),
        ("interference", "interference of other samples / own step", "log"),
    )
    all_axes = top.subplots(1, len(panels), sharey=True)
    for axes, (name, label, scale) in zip(all_axes, panels):
        errors = [row.factor * row.spread for row in rows] if name == "factor" else None
        axes.barh(range(len(rows)), [getattr(row, name) for row in rows], xerr=errors, height=0.8, color="0.45")
        axes.set_xlabel(label, fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(y=0.01)
        if scale == "log":
            axes.set_xscale(scale)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
    all_axes[0].set_yticks(range(len(rows)), _short([row.name for row in rows]), fontsize=6)
    all_axes[0].invert_yaxis()
    top.suptitle(f"Divergence by layer (loss: {diagnosis.loss})", fontsize=10)
    for part in bottom:
        axes = part.subplots()
        axes.barh(range(len(norms)), [norm.r2 for norm in norms], height=0.8, color="tab:blue")
        axes.set_yticks(range(len(norms)), _short([norm.name for norm in norms]), fontsize=6)
        axes.set_xlim(min(0.0, min(norm.r2 for norm in norms)), 1)
        axes.set_xlabel("dytness: R² of the best Dynamic Tanh", fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(y=0.01)
        axes.invert_yaxis()
    return _finish(figure, path)


def _short(names: list[str], longest: int = 34) -> list[str]:
    """Labels: without what all names begin with, and cut in the middle: a block's number is near the beginning."""
    parts = [name.split(".") for name in names]
    shared = len(os.path.commonprefix([words[:-1] for words in parts])) if len(names) > 1 else 0
    if any(words[shared].isdigit() for words in parts):
        shared = max(0, shared - 1)  # "layer.3.norm", not "3.norm"
    short = [".".join(words[shared:]) for words in parts]
    return [name if len(name) <= longest else f"{name[: longest - 12]}…{name[-11:]}" for name in short]


def _finish(figure, path: str | None):
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
