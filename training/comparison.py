"""What `compare.py` makes of its runs: the table, the paired tests, the pictures."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from matplotlib.figure import Figure

from training.estimates import Estimate, estimate
from training.records import read_records, write_whole

# The measure a comparison is about: the first of these that a task reports. True: more is better.
MEASURES = {"accuracy": True, "rmse": False, "mae": False, "loss": False}


class Row(NamedTuple):
    """One variant. `against`: of its differences from `ln` at equal seeds; None for `ln` itself."""

    variant: str
    seeds: int
    score: Estimate
    against: Estimate | None
    effect: float | None  # Cohen's d of the paired differences: their mean over their standard deviation
    added: int


def measure_of(records: list[dict]) -> str:
    scores = records[0]["metrics"]["test"]
    return next(name for name in MEASURES if name in scores)


def rows_of(records: list[dict], measure: str) -> list[Row]:
    by_variant: dict[str, dict[int, dict]] = defaultdict(dict)
    for record in records:
        by_variant[record["variant"]][record["seed"]] = record
    scores = {v: {s: r["metrics"]["test"][measure] for s, r in runs.items()} for v, runs in by_variant.items()}
    rows = []
    for variant, runs in by_variant.items():
        paired = sorted(set(scores[variant]) & set(scores.get("ln", {}))) if variant != "ln" else []
        differences = [scores[variant][seed] - scores["ln"][seed] for seed in paired]
        spread = stdev(differences) if len(differences) > 1 else 0.0
        rows.append(
            Row(
                variant=variant,
                seeds=len(runs),
                score=estimate(scores[variant].values()),
                against=estimate(differences) if differences else None,
                effect=mean(differences) / spread if spread > 0 else None,
                added=next(iter(runs.values()))["parameters"]["added"],
            )
        )
    return rows


def write_report(records: list[dict], folder: Path) -> Path:
    """`report.md` and its pictures; returns the path of the former."""
    if not records:
        raise ValueError(f"There is no run in {folder} to report.")
    measure = measure_of(records)
    rows = rows_of(records, measure)
    text = [f"# {records[0]['recipe']}: {len(rows)} variants", "", _what_ran(records), "", *_table(rows, measure)]
    picture(rows, measure, folder / "results.png")
    text += ["", f"![{measure} of each variant, and its difference from ln](results.png)"]
    gated = {v: runs for v, runs in histories(records).items() if runs}
    if gated:
        entropy_picture(gated, folder / "entropy.png")
        weight_picture(gated, folder / "norm_weight.png")
        text += ["", "## Gates", "", *_gate_lines(records, gated)]
        text += ["", "![Gate entropy by epoch](entropy.png)", "", "![Norm weight by layer](norm_weight.png)"]
    path = folder / "report.md"
    write_whole(path, "\n".join(text) + "\n")
    return path


def publish(runs: Path, folder: Path) -> Path:
    """The report of `runs`, its lines and pictures, and the card of the best run, into `folder`; all paths shortened.

    The best run is the patched one with the best score on the validation split, so that its test score, which the
    card gives, was not looked at. Returns the report's path.
    """
    records = read_records(runs / "runs.jsonl")
    if not records:
        raise ValueError(f"There is no run in {runs} to report.")
    measure = measure_of(records)
    patched = [record for record in records if record["variant"] != "ln"]
    card = None
    if patched:
        best = max(patched, key=lambda record: _goodness(record["metrics"]["validation"][measure], measure))
        card = runs / f"{best['variant']}-{best['seed']}" / "README.md"
        if not card.is_file():
            raise ValueError(f"The best run on the validation split has no model card any more: {card}.")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [without_folders(json.dumps(record)) for record in records]
    write_whole(folder / "runs.jsonl", "\n".join(lines) + "\n")
    if card:
        write_whole(folder / "best_run.md", without_folders(card.read_text(encoding="utf-8")))
    return write_report([json.loads(line) for line in lines], folder)


def _goodness(score: float, measure: str) -> float:
    """More is better, and what is no number is worst: the run has diverged."""
    return -math.inf if math.isnan(score) else score if MEASURES[measure] else -score


def without_folders(text: str) -> str:
    """Absolute paths in `text` become `.../NAME`: where somebody's data lay is nobody's business."""
    return re.sub(r"(?<![\w.:/])/(?:[^/\s\"'`]+/)+([^/\s\"'`]*)", r".../\1", text)


def _what_ran(records: list[dict]) -> str:
    rows, first = records[0]["rows"], records[0]
    counts = ", ".join(f"{count:,} {name}" for name, count in rows.items())
    seeds = sorted({record["seed"] for record in records})
    options = " ".join(first["overrides"]) or "none"
    return (
        f"Rows: {counts}; {first['epochs']:g} epochs, {first['steps']} steps; seeds {', '.join(map(str, seeds))}; "
        f"model {first['settings']['model_name_or_path']}; changes to the recipe: `{options}`. Scores are of the test "
        "split; intervals are 95 % (Student's t over seeds); tests are paired by seed, two-sided, not corrected for "
        "their number."
    )


def _table(rows: list[Row], measure: str) -> list[str]:
    better = "more" if MEASURES[measure] else "less"
    lines = [
        f"| variant | seeds | test {measure} ({better} is better) | difference from ln | p | effect size | added "
        "parameters |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: _goodness(row.score.mean, measure), reverse=True):
        against = "" if row.against is None else _interval(row.against, "+.4f")
        p = (
            ""
            if row.against is None or math.isnan(row.against.p)
            else f"{row.against.p:.3f}".replace("0.000", "< 0.001")
        )
        effect = "" if row.effect is None else f"{row.effect:+.2f}"
        lines.append(
            f"| `{row.variant}` | {row.seeds} | {_interval(row.score, '.4f')} | {against} | {p} | {effect} | "
            f"{row.added:,} |"
        )
    return lines


def _interval(value: Estimate, form: str) -> str:
    if math.isnan(value.low):
        return format(value.mean, form)
    return f"{value.mean:{form}} ({value.low:{form}} to {value.high:{form}})"


def histories(records: list[dict]) -> dict[str, list[list[dict]]]:
    """variant -> the gate history of each seed."""
    found = defaultdict(list)
    for record in records:
        if record["gate_history"]:
            found[record["variant"]].append(record["gate_history"])
    return found


def entropy_of(entry: dict) -> float:
    return mean(layer["entropy"] for layer in entry["layers"].values())


def gate_means(found: list[list[dict]]) -> tuple[float, float, float, float]:
    """Over layers and seeds: the entropy after the first epoch and the last, and at the end of training the weight of
    the original norm in the first third of the layers and the last."""
    first, last = (mean(entropy_of(history[index]) for history in found) for index in (0, -1))
    weights = [[layer["weights"][0] for layer in history[-1]["layers"].values()] for history in found]
    third = max(1, len(weights[0]) // 3)
    return first, last, mean(mean(w[:third]) for w in weights), mean(mean(w[-third:]) for w in weights)


def _gate_lines(records: list[dict], gated: dict[str, list[list[dict]]]) -> list[str]:
    titles = (
        "variant",
        "entropy, first epoch",
        "last epoch",
        "norm weight, first third of layers",
        "last third",
        "frozen",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|---:|---:|---:|---:|---|"]
    for variant, found in gated.items():
        first, last, early, late = gate_means(found)
        decisions = [r["freeze_decision"] for r in records if r["variant"] == variant and r["freeze_decision"]]
        decisions = [d for d in decisions if d["rule"] != "never"]  # these were only watched
        said = ", ".join(
            dict.fromkeys(f"{len(d['frozen'])} of {d['layers']} after epoch {d['epoch']:g}" for d in decisions)
        )
        lines.append(f"| `{variant}` | {first:.4f} | {last:.4f} | {early:.4f} | {late:.4f} | {said or 'never'} |")
    return lines


# --- pictures --------------------------------------------------------------------------------------------------------


def picture(rows: list[Row], measure: str, path: Path) -> None:
    figure = Figure(figsize=(10, 1.4 + 0.35 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = sorted(rows, key=lambda row: _goodness(row.score.mean, measure))
    for y, row in enumerate(rows):
        for axes, value in ((left, row.score), (right, row.against)):
            if value is not None:
                axes.plot(value.mean, y, "o", color="black")
                axes.plot([value.low, value.high], [y, y], color="black", lw=1)
    right.axvline(0, ls=":", color="0.5")
    left.set(xlabel=f"test {measure}, mean and 95 % interval")
    right.set(xlabel="difference from ln, paired by seed")
    left.set_yticks(range(len(rows)), [row.variant for row in rows])
    figure.savefig(path, dpi=120)


def entropy_picture(gated: dict[str, list[list[dict]]], path: Path) -> None:
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for variant, histories in gated.items():
        epochs = [entry["epoch"] for entry in histories[0]]
        means = [mean(entropy_of(history[i]) for history in histories) for i in range(len(epochs))]
        axes.plot(epochs, means, marker=".", label=variant)
    axes.set(xlabel="epoch", ylabel="gate entropy (nats)", title="Mean over layers and seeds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def weight_picture(gated: dict[str, list[list[dict]]], path: Path) -> None:
    """Norm weight of each layer over training, mean over seeds; the first layer blue, the last red."""
    figure = Figure(figsize=(4.2 * len(gated), 3.4), layout="constrained")
    for axes, (variant, histories) in zip(
        figure.subplots(1, len(gated), squeeze=False, sharey=True)[0], gated.items()
    ):
        names = list(histories[0][0]["layers"])
        epochs = [entry["epoch"] for entry in histories[0]]
        for index, name in enumerate(names):
            shade = index / max(1, len(names) - 1)
            weights = [mean(h[i]["layers"][name]["weights"][0] for h in histories) for i in range(len(epochs))]
            axes.plot(epochs, weights, lw=1, color=(0.1 + 0.8 * shade, 0.3, 0.9 - 0.8 * shade))
        axes.set(xlabel="epoch", title=variant)
    figure.get_axes()[0].set_ylabel("weight of the original norm")
    figure.savefig(path, dpi=120)
