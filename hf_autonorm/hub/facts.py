"""What can be told about a patched model in few rows."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from ..config import GateConfig, PatchConfig
from ..patching.record import patch_entries, wrappers
from ..patching.surgery import _describe


def pattern(name: str) -> str:
    """`encoder.layer.7.norm` → `encoder.layer.*.norm`: modules of repeated blocks share one."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(the model itself)"


def patched_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The patched modules, those of repeated blocks in one row: modules, count, original, now, parameters."""
    groups: dict[tuple, dict[str, Any]] = {}
    for name, wrapper in wrappers(model):
        row = {
            "modules": pattern(name.replace("._orig_mod", "")),
            "original": type(wrapper.original).__name__,
            "now": _describe(wrapper),
        }
        group = groups.setdefault(tuple(row.values()), {**row, "count": 0, "parameters": 0})
        group["count"] += 1
        group["parameters"] += sum(p.numel() for p in wrapper.new_parameters())
    return list(groups.values())


def calls(model: nn.Module) -> list[str]:
    """The `patch` calls that lead to this model, with the settings that are not the defaults."""
    lines = []
    for entry in patch_entries(model):
        config, default = PatchConfig.from_dict(entry["spec"]), PatchConfig()
        words = [f"{k}={v!r}" for k, v in _changed(config, default).items() if k != "gate"]
        gate = _changed(config.gate, GateConfig())
        if gate:
            words.append(f"gate=GateConfig({', '.join(f'{k}={v!r}' for k, v in gate.items())})")
        lines.append(f"patch({', '.join(['model', *words])})")
    return lines


def _changed(config: Any, default: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if value != getattr(default, name)}


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
                from .. import __version__

                found[package] = __version__
    return found
