"""One HTML page of a training run: results, freeze decision, curves, gates, plan, divergence.

Reads what a run leaves in its folder, no model: `results.json` (training/train.py), `trainer_state.json` (any Trainer;
the folder's own, or that of its newest checkpoint), `config.json` or `autonorm_config.json`, and `diagnosis.json`
(`hf-autonorm diagnose … --json`). The page loads nothing from elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from .decision import describe
from .errors import ConfigError
from .hub.facts import call
from .hub.reading import RECORD_FILE
from .tables import pattern

_MOST_POINTS = 300  # of a curve, and epochs under the slider: what a screen can show
_MOST_LAYERS = 40  # of the divergence ranking
_NOT_HEADLINES = ("loss", "words", "tokens")
_TIMING = ("runtime", "per_second", "epoch", "step", "total_flos", "memory")


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Writes the page of the run in `folder` to `output` (default: `folder/report.html`); returns its path.

    Raises ConfigError where the folder holds neither results nor a trainer state, a file of it is no JSON or tells
    other things than those programs write, or `output` is a folder.
    """
    from jinja2 import Environment

    folder = Path(folder)
    output = folder / "report.html" if output is None else Path(output)
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; give the name of a file for the page")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "signed": lambda value: f"{value:+.4g}"}
    template = environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    try:
        page = template.render(collect(folder))
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a file in {folder} (results.json, trainer_state.json, config.json, diagnosis.json) is not as "
            f"training/train.py, Trainer or `hf-autonorm diagnose` writes it: {type(error).__name__}: {error}"
        ) from error
    output.parent.mkdir(parents=True, exist_ok=True)
    half_written = output.with_name(output.name + ".tmp")
    half_written.write_text(page, encoding="utf-8")
    os.replace(half_written, output)
    return output


def collect(folder: Path) -> dict[str, Any]:
    """What the page tells, by section; a section without facts is None or empty. Numbers that are no numbers: None."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    state_file = _state_file(folder)
    state = _read(state_file)
    results = _read(folder / "results.json")
    if results is None and state is None:
        raise ConfigError(
            f"{folder} holds neither results.json nor a trainer_state.json (its own or a checkpoint's): give the "
            "output_dir of a run of training/train.py or of any Trainer"
        )
    if results is not None and not (isinstance(results, dict) and isinstance(results.get("metrics"), dict)):
        remedy = f"; try {folder / 'model'}" if (folder / "model" / "results.json").is_file() else ""
        raise ConfigError(f"{folder / 'results.json'} has no metrics: training/train.py did not write it{remedy}")
    results, state = results or {}, state or {}
    watcher = _watcher(state)
    decision = results.get("freeze_decision") or watcher.get("decision")
    patches = _patches(folder, state_file)
    return {
        "name": folder.resolve().name,
        "results": results,
        "steps": results.get("steps", state.get("global_step")),
        "epochs": results.get("epochs", state.get("epoch")),
        "scores": (scores := _scores(results, folder)),
        "headline": [pair for pair in (scores or {}).get("test", {}).items() if pair[0] not in _NOT_HEADLINES][:4],
        "decision": decision,
        "decided": describe(decision),
        "stationarity": _stationarity(results.get("stationarity")),
        "patches": [_patch(entry) for entry in patches],
        "diagnosis": _diagnosis(_read(folder / "diagnosis.json")),
        "data": {
            "curves": _curves(state.get("log_history", [])),
            "gates": _gates(results.get("gate_history") or watcher.get("history") or [], patches, decision),
        },
    }


# --- files -----------------------------------------------------------------------------------------------------------


def _read(path: Path | None) -> Any:
    """A JSON file's content with None for NaN and infinities; None where there is no file."""
    if path is None or not path.is_file():
        return None
    try:
        return _finite(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _state_file(folder: Path) -> Path | None:
    own = folder / "trainer_state.json"
    steps = [(p.parent.name.removeprefix("checkpoint-"), p) for p in folder.glob("checkpoint-*/trainer_state.json")]
    newest = max(((int(step), p) for step, p in steps if step.isdigit()), default=(0, None))[1]
    return own if own.is_file() else newest


def _watcher(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What GateFreezeCallback, or a class made from it, left in the trainer state."""
    for saved in state.get("stateful_callbacks", {}).values():
        for entry in saved if isinstance(saved, list) else [saved]:
            if {"decision", "history"} <= entry.get("attributes", {}).keys():
                return entry["attributes"]
    return {}


def _patches(folder: Path, state_file: Path | None) -> list[dict[str, Any]]:
    """Of the model in the folder, or of the newest checkpoint where Trainer has left nothing else."""
    for place in dict.fromkeys((folder, state_file.parent if state_file else folder)):
        config = _read(place / "config.json") or {}
        record = _read(place / RECORD_FILE) or config.get("quantization_config") or {}
        if record.get("quant_method") == "autonorm":
            return record.get("patches", [])
    return []


# --- sections --------------------------------------------------------------------------------------------------------


def _scores(results: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Every measure by split, and the baseline's test results where its folder is still there."""
    splits = {name: _without_timing(measured) for name, measured in results.get("metrics", {}).items()}
    if not splits:
        return None
    given = results.get("settings", {}).get("baseline")
    places = [Path(given), folder.parent / Path(given).name] if given else []
    found = next((place / "results.json" for place in places if (place / "results.json").is_file()), None)
    baseline = _without_timing((_read(found) or {}).get("metrics", {}).get("test", {}))
    names = dict.fromkeys(name for measured in splits.values() for name in measured)
    rows = [(name, [measured.get(name) for measured in splits.values()], baseline.get(name)) for name in names]
    return {"splits": list(splits), "rows": rows, "has_baseline": bool(baseline), "test": splits.get("test", {})}


def _without_timing(measured: Mapping[str, Any]) -> dict[str, float]:
    return {name: v for name, v in measured.items() if not name.endswith(_TIMING) and _is_number(v)}


def _is_number(value: Any) -> bool:
    """Not a text, a list (scores by class) or a dictionary (a freeze decision); None was NaN."""
    return value is None or isinstance(value, (int, float))


def _stationarity(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not said:
        return None
    distance = {float(epoch): value for epoch, value in (said.get("distance") or {}).items()}
    drift = {float(entry["epoch"]): entry for entry in said.get("drift") or []}
    rows = [
        (epoch, drift.get(epoch, {}).get("mean"), _largest(drift.get(epoch, {}).get("layers", {}).values()),
         distance.get(epoch))
        for epoch in sorted({*drift, *distance})
    ]  # fmt: skip
    return {"rows": rows, "advice": said.get("advice", "")}


def _largest(values: Iterable[float | None]) -> float | None:
    """None if any is, as of NaN."""
    values = list(values)
    return None if None in values else max(values, default=None)


def _patch(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One setting, and what it was put on: modules of repeated blocks in one row."""
    groups = Counter(pattern(name) for name in entry["modules"])
    return {"call": call(entry["spec"]), "count": len(entry["modules"]), "groups": list(groups.items())}


def _diagnosis(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not found or not found.get("layers"):
        return None
    layers = sorted(found["layers"], key=lambda row: -(row["divergence"] or 0))
    norms = sorted(found.get("norms", []), key=lambda row: -(row["r2"] or 0))
    return {"loss": found.get("loss"), "layers": layers[:_MOST_LAYERS], "all": len(layers), "norms": norms}


def _curves(log: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One picture a measure: training loss beside evaluation loss, then every other one that was logged."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for entry in log:
        for name, value in entry.items():
            if "step" not in entry or not _is_number(value) or name.endswith(_TIMING) or name == "train_loss":
                continue
            measure = name.removeprefix("eval_")
            series = "evaluation" if name.startswith("eval_") else "training"
            found.setdefault(measure, {}).setdefault(series, []).append([entry["step"], value])
    curves = [
        {"name": measure, "series": [{"name": name, "points": _thinned(points)} for name, points in series.items()]}
        for measure, series in found.items()
        if max(len(points) for points in series.values()) > 1
    ]
    return sorted(curves, key=lambda curve: (curve["name"] != "loss", "evaluation" not in found[curve["name"]]))


def _gates(
    history: list[Mapping[str, Any]], patches: list[dict[str, Any]], decision: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Weights by epoch, layer and branch; entropies by epoch and layer."""
    if not history:
        return None
    history = _thinned(history)
    layers = list(history[0]["layers"])
    of_layer = {module: entry["spec"]["branches"] for entry in patches for module in entry["modules"]}
    count = max(len(values["weights"]) for values in history[0]["layers"].values())
    # Layers may have different branches; a colour then stands for all that are at its place.
    lists = [of_layer[name] for name in layers if name in of_layer]
    named = [" / ".join(dict.fromkeys(names[i] for names in lists if i < len(names))) for i in range(count - 1)]
    return {
        "layers": layers,
        "branches": ["the original norm", *(name or f"branch {i}" for i, name in enumerate(named, 1))],
        "epochs": [entry["epoch"] for entry in history],
        "steps": [entry["step"] for entry in history],
        "strengths": [entry.get("strength") for entry in history],
        "weights": [[_rounded(entry["layers"][name]["weights"]) for name in layers] for entry in history],
        "entropies": [_rounded(entry["layers"][name]["entropy"] for name in layers) for entry in history],
        "frozen": {"epoch": decision["epoch"], "layers": decision["frozen"]} if decision else None,
    }


def _thinned(points: list[Any]) -> list[Any]:
    """At most _MOST_POINTS of them, evenly spaced, the last one among them."""
    step = -(-len(points) // _MOST_POINTS)
    return points[::-1][::step][::-1] if points else points


def _rounded(values: Any) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
