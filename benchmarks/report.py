"""The results of a run as tables and as JSON."""

from __future__ import annotations

import io
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import hf_autonorm

from .budgets import Verdict
from .growth import Growth
from .imports import ImportTimes
from .memory import Saved
from .patching import PatchTimes
from .timing import Section


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_autonorm": hf_autonorm.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def table(result: Any) -> Table:
    """Of one result, whatever its kind."""
    builder = {Section: _section, Saved: _saved, Growth: _growth, PatchTimes: _patching, ImportTimes: _imports}
    return builder[type(result)](result)


def _columns(title: str, first: str, *numbers: str) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _section(section: Section) -> Table:
    rounds = len(section.samples[section.reference])
    made = _columns(
        f"{section.title} ({rounds} rounds)", "", "median ms", "fastest ms", f"× {section.reference}", "95 % interval"
    )
    for name in section.samples:
        ratio = section.ratio(name)
        made.add_row(
            name,
            f"{1e3 * section.median(name):.3g}",
            f"{1e3 * section.fastest(name):.3g}",
            f"{ratio.value:.3f}",
            f"{ratio.low:.3f} … {ratio.high:.3f}",
        )
    return made


def _saved(saved: Saved) -> Table:
    made = _columns(saved.title, "", "MB", f"× {saved.reference}")
    for name, count in saved.bytes.items():
        made.add_row(name, f"{count / 1e6:.1f}", f"{saved.ratio(name):.3f}")
    return made


def _growth(growth: Growth) -> Table:
    made = _columns(
        f"{growth.title}: ms",
        growth.axis,
        *map(str, growth.sizes),
        f"per unit, {growth.sizes[-1]} ÷ {growth.sizes[0]}",
    )
    for name, seconds in growth.seconds.items():
        made.add_row(name, *(f"{1e3 * s:.3g}" for s in seconds), f"{growth.last_to_first(name):.2f}")
    return made


def _patching(times: PatchTimes) -> Table:
    made = _columns(
        f"{times.title}: CPU seconds (first call of the process {times.first:.2f})",
        "patched",
        *(f"{size}, {count} modules" for size, count in times.modules.items()),
        "exponent",
    )
    for rule, row in times.seconds.items():
        made.add_row(rule, *(f"{s:.3f}" for s in row.values()), f"{times.exponent(rule):.2f}")
    return made


def _imports(times: ImportTimes) -> Table:
    made = _columns(f"{times.title} ({len(times.ours)}): seconds", "", "median", "fastest")
    for name, values in (
        ("AutoModel and Trainer", times.transformers),
        ("hf_autonorm, beyond them", times.ours),
        ("the same, CPU time", times.ours_cpu),
    ):
        made.add_row(name, f"{sorted(values)[len(values) // 2]:.3f}", f"{min(values):.3f}")
    return made


def budget_table(verdicts: list[Verdict]) -> Table:
    made = Table(title="Budgets", title_justify="left")
    for name in ("work", "budget", "measured", "", "note"):
        made.add_column(name, justify="right" if name in ("budget", "measured") else "left")
    for row in verdicts:
        word = {True: "[green]met[/green]", False: "[red]missed[/red]", None: "[dim]not measured[/dim]"}[row.met]
        measured = "" if row.measured is None else f"{row.measured:.2f} {row.unit}"
        made.add_row(row.work, f"≤ {row.limit:.2f} {row.unit}", measured, word, row.note)
    return made


def write(results: dict[str, Any], verdicts: list[Verdict], folder: Path) -> None:
    """`results.json` (everything, samples too) and `tables.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "machine": machine(),
        "budgets": [{**asdict(row), "met": row.met} for row in verdicts],
        "results": {name: {"kind": type(result).__name__, **asdict(result)} for name, result in results.items()},
    }
    console = Console(width=150, file=io.StringIO())
    for made in (*map(table, results.values()), budget_table(verdicts)):
        console.print(made)
    _put(folder / "results.json", json.dumps(facts, indent=1))
    _put(folder / "tables.txt", console.file.getvalue())


def _put(path: Path, text: str) -> None:
    half_written = path.with_suffix(".part")
    half_written.write_text(text, encoding="utf-8")
    os.replace(half_written, path)
