"""What can be told about a patched model and its training in few rows."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from ..config import GateConfig, PatchConfig
from ..patching.build import describe
from ..patching.record import patch_entries, wrappers
from ..tables import pattern


@dataclass
class TrainingFacts:
    """What a model card tells of the training; what is None or empty is left out of it."""

    base_model: str | None = None  # Hub id
    dataset: str | Mapping[str, str] | None = None  # as in `save_pretrained`
    baseline: Mapping[str, float] | None = None  # results of the unpatched model
    license: str | None = None
    command: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the model as it was at the end
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # {"epoch", "step", "loss", metrics}, in order
    examples: int | None = None  # training rows
    seconds: float | None = None
    resumed_from: int | None = None  # step of the checkpoint; the seconds are those since
    hardware: str | None = None


def patched_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The patched modules, those of repeated blocks in one row: modules, count, original, now, parameters."""
    groups: dict[tuple, dict[str, Any]] = {}
    for name, wrapper in wrappers(model):
        row = {
            "modules": pattern(name.replace("._orig_mod", "")),
            "original": type(wrapper.original).__name__,
            "now": describe(wrapper),
        }
        group = groups.setdefault(tuple(row.values()), {**row, "count": 0, "parameters": 0})
        group["count"] += 1
        group["parameters"] += sum(p.numel() for p in wrapper.new_parameters())
    return list(groups.values())


def calls(model: nn.Module) -> list[str]:
    """The `patch` calls that lead to this model, with the settings that are not the defaults."""
    return [call(entry["spec"]) for entry in patch_entries(model)]


def call(spec: dict[str, Any]) -> str:
    """The `patch` call of one saved setting; its branches need not be registered here."""
    changed = _changed(spec, PatchConfig().to_dict())
    gate = _changed(changed.pop("gate", {}), GateConfig().to_dict())
    words = [f"{k}={v!r}" for k, v in changed.items()]
    if gate:
        words.append(f"gate=GateConfig({', '.join(f'{k}={v!r}' for k, v in gate.items())})")
    return f"patch({', '.join(['model', *words])})"


def _changed(spec: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    return {name: spec[name] for name, value in default.items() if name in spec and spec[name] != value}


def evaluation_table(evaluations: list[dict[str, Any]], longest: int = 20) -> list[list[str]]:
    """A heading and a row an evaluation, as text; of a long run evenly spaced ones, the last among them."""
    if not evaluations:
        return []
    names = list(dict.fromkeys(name for row in evaluations for name in row))
    step = -(-len(evaluations) // longest)
    chosen = evaluations[::-1][::step][::-1]
    shown = [[f"{row[n]:.6g}" if isinstance(row.get(n), (int, float)) else "" for n in names] for row in chosen]
    return [[name.replace("_", " ") for name in names], *shown]


_SECRET = re.compile(
    r"(--?[\w-]*(?:token(?!s)|secret|password|api[-_]?key)[\w-]*[ =])(\"[^\"]*\"|'[^']*'|\S+)|\bhf_\w{16,}"
)


def without_secrets(command: str | None) -> str | None:
    """A command line for everyone to read: the value of `--hub_token` and its like, and Hub tokens, become `…`."""
    return None if command is None else _SECRET.sub(lambda found: f"{found.group(1) or ''}…", command)


def versions() -> dict[str, str]:
    """Of Python and the packages that matter for loading the model again."""
    found = {"python": platform.python_version()}
    for package in ("hf_autonorm", "torch", "transformers", "timm", "huggingface_hub", "safetensors", "accelerate"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package == "hf_autonorm":  # run from a checkout
                from ..version import __version__

                found[package] = __version__
    return found


def duration(seconds: float | None) -> str | None:
    """`1 h 02 min`, `3 min 20 s`, `12.3 s`."""
    if seconds is None or not math.isfinite(seconds):
        return None
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
