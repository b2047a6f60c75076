"""How cost grows with the number of tokens, with width and with depth; the picture of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hf_autonorm import patch

from .layers import work
from .models import UNPATCHED, encoder, training_step
from .patching import PatchTimes
from .timing import measure

LAYERS = ["LayerNorm", "DyT", "naive AutoNorm", "AutoNorm, eager", "AutoNorm, fused"]
COLORS = dict(zip([*LAYERS, UNPATCHED, "AutoNorm"], ("0.2", "0.6", "C3", "C0", "C2", "0.2", "C2")))


@dataclass(frozen=True)
class Growth:
    """Median seconds along one axis, by name; `per` of each point is what the picture divides by."""

    title: str
    axis: str
    sizes: list[int]
    seconds: dict[str, list[float]]

    def last_to_first(self, name: str) -> float:
        """Cost per unit of size at the largest size, in units of that at the smallest: 1 is linear growth."""
        values = [s / n for s, n in zip(self.seconds[name], self.sizes)]
        return values[-1] / values[0]


def run(
    seconds: float,
    tokens: tuple[int, ...] = (1024, 4096, 16384, 65536),
    widths: tuple[int, ...] = (128, 512, 2048, 4096),
    depths: tuple[int, ...] = (1, 2, 4, 8, 16),
    width: int = 256,
    rows: int = 2048,
) -> dict[str, Growth]:
    share = seconds / 3
    layers = f"forward + backward, fp32, {torch.get_num_threads()} threads"
    by_tokens = [_layers(width, n, share / len(tokens)) for n in tokens]
    by_width = [_layers(w, rows, share / len(widths)) for w in widths]
    by_depth = [_depth(d, share / len(depths)) for d in depths]
    return {
        "growth with tokens": Growth(f"width {width}, {layers}", "tokens", list(tokens), _columns(by_tokens)),
        "growth with width": Growth(f"{rows} tokens, {layers}", "width", list(widths), _columns(by_width)),
        "growth with depth": Growth(
            "encoder of width 128, batch 4×32, training step", "layers", list(depths), _columns(by_depth)
        ),
    }


def _layers(width: int, tokens: int, seconds: float) -> dict[str, float]:
    section = measure("", LAYERS[0], work(width, tokens, True, LAYERS), seconds)
    return {name: section.median(name) for name in section.samples}


def _depth(depth: int, seconds: float) -> dict[str, float]:
    ids = torch.randint(1, 64, (4, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(4, dtype=torch.long)}
    models = {UNPATCHED: encoder(depth, 128, 4, 64), "AutoNorm": patch(encoder(depth, 128, 4, 64))}
    steps = {name: training_step(model, lambda output: output.loss, inputs) for name, model in models.items()}
    section = measure("", UNPATCHED, steps, seconds)
    return {name: section.median(name) for name in section.samples}


def _columns(points: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [point[name] for point in points] for name in points[0]}


def draw(growths: dict[str, Growth], patching: PatchTimes | None, path: Path) -> None:
    """Four panels: time per token by tokens and by width, training step by depth, patch time by modules."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = iter(figure.subplots(2, 2).flat)
    for growth in growths.values():
        axes = next(panels)
        per_token = growth.axis == "tokens"
        for name, seconds in growth.seconds.items():
            values = [1e9 * s / n if per_token else 1e3 * s for s, n in zip(seconds, growth.sizes)]
            axes.plot(growth.sizes, values, marker="o", ms=4, label=name, color=COLORS[name])
        axes.set(xscale="log", yscale="log", xlabel=growth.axis, ylabel="ns per token" if per_token else "ms")
        axes.set_xticks(growth.sizes, [f"{n // 1024}k" if n >= 1024 else str(n) for n in growth.sizes], minor=False)
        axes.minorticks_off()
        axes.set_title(growth.title, fontsize="medium")
        axes.legend(fontsize="small")
    axes = next(panels)
    if patching is None:
        axes.set_axis_off()
    else:
        counts = list(patching.modules.values())
        for rule, row in patching.seconds.items():
            label = f"{rule}: grows to the power of {patching.exponent(rule):.2f}"
            axes.plot(counts, list(row.values()), marker="o", ms=4, label=label)
        for size, count in patching.modules.items():
            axes.annotate(size, (count, patching.seconds["norms"][size]), xytext=(0, 7), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="modules of the model", ylabel="CPU seconds")
        axes.set_title(patching.title, fontsize="medium")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
