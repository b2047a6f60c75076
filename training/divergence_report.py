"""Tables, claims and pictures of `affine_divergence.py`, from its lines of runs alone."""

import os
from pathlib import Path

import numpy as np

from training.divergence_statistics import (
    Scores,
    Setting,
    batch_slope,
    final_runs,
    growth,
    lead,
    middle_net,
    middle_settings,
    nets_at_main_batch,
    scores_of,
    setting_of,
    slopes_by_seed,
)
from training.estimates import Estimate, estimate
from training.records import write_whole

LABELS = {
    "none": "none",
    "batch_norm": "BatchNorm",
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "norm_like": "norm-like",
    "norm_like_half": "norm-like, η/2",
    "affine_like": "affine-like",
}
ACTIVATIONS = {"tanh": "Tanh", "leaky_relu": "Leaky-ReLU"}
FAMILIES = {"fc": "Fully connected nets", "conv": "Conv nets (norm-like and affine-like: PatchNorm)"}
ON_PAR = 0.01  # a lead above minus this accuracy counts as on par
FIXED = ("data", "epochs", "train_images", "validation_images", "test_images")


def verdict(e: Estimate) -> str:
    """Of a claim that a number is positive."""
    if not e.p < 0.05:
        return "undecided"
    return "holds" if e.mean > 0 else "does not hold: the opposite does"


def claims(scores: Scores) -> list[list[str]]:
    """Rows of claim, what was measured (in points of accuracy), 95 % interval, p, verdict."""
    rows = []

    def add(claim: str, measured: str, e: Estimate, outcome: str) -> None:
        numbers = [f"{100 * e.mean:+.2f}", f"[{100 * e.low:+.2f}, {100 * e.high:+.2f}]", f"{e.p:.2g}"]
        rows.append([claim, measured, *(numbers if e.p == e.p else [numbers[0], "", ""]), outcome])

    families = {setting.family for setting in scores}
    if "fc" in families:
        fc = nets_at_main_batch(scores, "fc")
        for a, b in (
            ("affine_like", "norm_like"),
            ("affine_like", "norm_like_half"),
            ("norm_like", "layer_norm"),
            ("affine_like", "layer_norm"),
            ("affine_like", "batch_norm"),
            ("affine_like", "none"),
        ):
            e = estimate(np.mean(values) for values in lead(scores, fc, a, b).values())
            add(f"fc: {LABELS[a]} ≥ {LABELS[b]}", f"lead, mean of {len(fc)} nets", e, verdict(e))
        leads = lead(scores, fc, "affine_like", "layer_norm")
        for axis in ("depth", "width"):
            e = estimate(growth(leads, fc, axis))
            add(f"fc: lead of affine-like over LayerNorm grows with {axis}", f"per doubling of {axis}", e, verdict(e))
    for family in (name for name in FAMILIES if name in families):
        plain = slopes_by_seed(scores, family, "none")
        for method in ("affine_like", "norm_like"):
            own = slopes_by_seed(scores, family, method)
            e = estimate(own.values())
            against = estimate(-slope for slope in own.values())
            add(f"{family}: {LABELS[method]} loses with batch size", "per doubling of the batch", e, verdict(against))
            e = estimate(own[seed] - plain[seed] for seed in own.keys() & plain.keys())
            against = Estimate(-e.mean, -e.high, -e.low, e.p)
            add(f"{family}: {LABELS[method]} loses more than none", "difference of those slopes", e, verdict(against))
        for method in ("none", "batch_norm"):
            e = estimate(slopes_by_seed(scores, family, method).values())
            outcome = "undecided" if not e.p < 0.05 else "holds" if e.mean > 0 else "does not hold: it does"
            add(f"{family}: {LABELS[method]} does not lose with batch size", "per doubling of the batch", e, outcome)
    if "conv" in families:
        conv = sorted(setting for setting in scores if setting.family == "conv")
        for a in ("affine_like", "norm_like"):
            for b in ("batch_norm", "layer_norm", "none"):
                e = estimate(np.mean(values) for values in lead(scores, conv, a, b).values())
                outcome = "undecided"
                if e.low > -ON_PAR:
                    outcome = "holds"
                elif e.high < -ON_PAR:
                    outcome = "does not hold"
                claim = f"conv: PatchNorm ({LABELS[a]}) on par with {LABELS[b]} (within {100 * ON_PAR:g} point)"
                add(claim, f"lead, mean of {len(conv)} settings", e, outcome)
    return rows


def accuracy_cell(by_seed: dict[int, float]) -> str:
    if not by_seed:
        return ""
    e = estimate(by_seed.values())
    return f"{100 * e.mean:.1f}" + (f" ± {100 * (e.high - e.mean):.1f}" if e.high == e.high else "")


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    aligned = ["---", *["---:"] * (len(head) - 1)]
    return [*("| " + " | ".join(cells) + " |" for cells in (head, aligned, *rows)), ""]


def report_text(records: list[dict]) -> str:
    finals = final_runs(records)
    scores = scores_of(finals)
    first = records[0]
    seeds = len({record["seed"] for record in records})
    rates = sorted({r["lr"] for r in records if r["method"] != "norm_like_half"})
    picked = {(setting_of(r), r["method"]): r["lr"] for r in finals if r["method"] != "norm_like_half"}
    at_edge = sum(lr in (rates[0], rates[-1]) for lr in picked.values())
    lines = [
        "# The Affine Divergence on CIFAR-10",
        "",
        f"{first['data']}: {first['train_images']:,} of 50,000 training images, {first['validation_images']:,} others "
        f"for validation, {first['test_images']:,} to test; {first['epochs']} epochs of plain SGD, {seeds} seeds.",
        "",
        f"{len(records)} runs, {len(records) - len(finals)} of them only to choose learning rates (by validation "
        f"accuracy at seed 0, {rates[0]:g} to {rates[-1]:g}; {at_edge} of {len(picked)} choices lie at an end of "
        f"that); {sum(r['diverged'] for r in records)} diverged, {sum(r['diverged'] for r in finals)} of them among "
        f"the {len(finals)} final runs below, where they count with 10 %. "
        f"{sum(r['seconds'] for r in records) / 60:.0f} minutes, added up over processes.",
        "",
        "Test accuracy in per cent, mean ± half of the 95 % interval over seeds (Student's t).",
        "",
    ]
    for family in (name for name in FAMILIES if any(s.family == name for s in scores)):
        nets = nets_at_main_batch(scores, family)
        for activation in dict.fromkeys(s.activation for s in nets):
            shown = [s for s in nets if s.activation == activation]
            lines += [f"## {FAMILIES[family]}, {ACTIVATIONS[activation]}, batch {shown[0].batch_size}", ""]
            head = ["width × depth", *(f"{s.width} × {s.depth}" for s in shown)]
            lines += markdown(head, [[LABELS[m], *(accuracy_cell(scores[s][m]) for s in shown)] for m in LABELS])
        shown = middle_net(scores, family)
        lines += [
            f"## {FAMILIES[family]}: batch size",
            "",
            f"{shown[0].width} × {shown[0].depth}, {ACTIVATIONS[shown[0].activation]}; the slope in points of "
            "accuracy per doubling of the batch; p against a slope of 0, over all runs.",
            "",
        ]
        rows = []
        for method in LABELS:
            fit = batch_slope(scores, family, method)
            numbers = [f"{100 * fit.slope:+.2f}", f"{fit.pvalue:.2g}"] if fit else ["", ""]
            rows.append([LABELS[method], *(accuracy_cell(scores[s][method]) for s in shown), *numbers])
        lines += markdown(["batch size", *(str(s.batch_size) for s in shown), "slope", "p"], rows)
    lines += ["## Learning rates", ""]
    chosen = {(setting_of(r), r["method"]): r["lr"] for r in finals}
    shown = middle_settings(scores)
    head = ["middle nets", *(f"{s.family} {ACTIVATIONS[s.activation]} {s.batch_size}" for s in shown)]
    rows = [[LABELS[m], *(f"{chosen[s, m]:g}" if (s, m) in chosen else "" for s in shown)] for m in LABELS]
    lines += markdown(head, rows)
    lines += [
        "## The claims of the paper",
        "",
        "Paired over seeds: one number a seed (the mean over nets where there are several), Student's t against 0. "
        "holds: p < 0.05 in the claimed direction. Points of accuracy. No correction for the number of claims.",
        "",
    ]
    lines += markdown(["claim", "measured", "points", "95 % interval", "p", "here"], claims(scores))
    return "\n".join(lines)


def write_report(records: list[dict], folder: Path) -> Path:
    """Writes report.md and the pictures into `folder` and prints the former; returns its path."""
    if not records:
        raise ValueError(f"{folder} holds no complete run.")
    for name in FIXED:
        values = {record[name] for record in records}
        if len(values) > 1:
            raise ValueError(f"The runs in {folder} differ in {name}: {sorted(values)}; one folder for each.")
    text = report_text(records)
    scores = scores_of(final_runs(records))
    if any(setting.family == "fc" for setting in scores):
        save(draw_sizes(scores), folder / "accuracy_by_size.png")
    save(draw_batches(scores), folder / "accuracy_by_batch_size.png")
    path = folder / "report.md"
    write_whole(path, text)
    print(text)
    return path


def save(figure, path: Path) -> None:
    half_written = path.with_suffix(".tmp")
    figure.savefig(half_written, dpi=120, format="png")
    os.replace(half_written, path)


def draw_line(axes, scores: Scores, settings: list[Setting], xs: list[float], method: str, label: str) -> None:
    colour = f"C{list(LABELS).index(method)}"
    shown = [(x, estimate(scores[s][method].values())) for x, s in zip(xs, settings) if scores[s][method]]
    offset = 0.03 * (list(LABELS).index(method) - 3)  # so that intervals do not hide one another
    x = [x + offset for x, _ in shown]
    y = [100 * e.mean for _, e in shown]
    half = [100 * (e.high - e.mean) if e.high == e.high else 0 for _, e in shown]
    axes.errorbar(x, y, half, marker="o", ms=3, lw=1.2, capsize=2, color=colour, label=label)


def draw_sizes(scores: Scores):
    """Accuracy of fully connected nets over width (middle depth) and over depth (middle width)."""
    from matplotlib.figure import Figure

    nets = nets_at_main_batch(scores, "fc")
    activations = list(dict.fromkeys(s.activation for s in nets))
    width, depth = middle_net(scores, "fc")[0][2:4]
    figure = Figure(figsize=(10, 4 * len(activations)), layout="constrained")
    for row, activation in zip(figure.subplots(len(activations), 2, squeeze=False), activations):
        for axes, axis, fixed, value in zip(row, ("width", "depth"), ("depth", "width"), (depth, width)):
            shown = [s for s in nets if s.activation == activation and getattr(s, fixed) == value]
            sizes = [getattr(s, axis) for s in shown]
            for method, label in LABELS.items():
                draw_line(axes, scores, shown, np.log2(sizes).tolist(), method, label)
            axes.set_xticks(np.log2(sizes), [str(size) for size in sizes])
            axes.set(xlabel=axis, ylabel="test accuracy, %", title=f"{ACTIVATIONS[activation]}, {fixed} {value}")
            axes.grid(alpha=0.3)
    row[-1].legend(fontsize="small")
    return figure


def draw_batches(scores: Scores):
    """Accuracy over log2 of the batch size with the fitted lines; slope and p in the legend."""
    from matplotlib.figure import Figure

    families = [name for name in FAMILIES if any(s.family == name for s in scores)]
    figure = Figure(figsize=(7 * len(families), 5), layout="constrained")
    for axes, family in zip(figure.subplots(1, len(families), squeeze=False)[0], families):
        settings = middle_net(scores, family)
        xs = [float(np.log2(s.batch_size)) for s in settings]
        for method, label in LABELS.items():
            fit = batch_slope(scores, family, method)
            if fit:
                label += f": {100 * fit.slope:+.2f}, p = {fit.pvalue:.1g}"
                ends = np.array([xs[0], xs[-1]])
                line = 100 * (fit.intercept + fit.slope * ends)
                axes.plot(ends, line, ls=":", lw=1, color=f"C{list(LABELS).index(method)}")
            draw_line(axes, scores, settings, xs, method, label)
        axes.set_xticks(xs, [str(s.batch_size) for s in settings])
        title = f"{FAMILIES[family]}: {settings[0].width} × {settings[0].depth}, {ACTIVATIONS[settings[0].activation]}"
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="batch size", ylabel="test accuracy, %")
        axes.legend(fontsize="small", title="points per doubling")
        axes.grid(alpha=0.3)
    return figure
