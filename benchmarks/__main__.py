"""Speed and memory beside peers: tables, JSON, one picture, and the budgets.

python -m benchmarks                     everything, in less than ten minutes on two cores
python -m benchmarks layers models       some sections of it
python -m benchmarks --threads 2 --output runs/bench

A time that another program disturbs counts little (see timing.py), but leave the machine alone all the same.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .budgets import verdicts
from .growth import Growth, draw
from .report import budget_table, machine, table, write

# section: (seconds of timing at --scale 1, arguments that make it tiny)
SECTIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "layers": (45.0, {"width": 20, "tokens": 8}),
    "corrections": (30.0, {"width": 20, "tokens": 8, "channels": 4, "images": 1, "side": 4}),
    "models": (150.0, {"tiny": True}),
    "memory": (0.0, {"depth": 1, "images": 2}),
    "growth": (45.0, {"tokens": (8, 16), "widths": (20, 40), "depths": (1, 2), "width": 20, "rows": 8}),
    "patching": (0.0, {"sizes": ("1 B", "8 B"), "repeats": 1}),
    "imports": (0.0, {"processes": 1}),
}


def run(names: list[str], scale: float = 1.0, tiny: bool = False, console: Console | None = None) -> dict[str, Any]:
    """The results of these sections, by title. `tiny`: as small as they run, no time means anything."""
    console, results = console or Console(), {}
    for number, name in enumerate(names, 1):
        seconds, small = SECTIONS[name]
        start = time.perf_counter()
        with console.status(f"{name} ({number} of {len(names)})"):
            found = importlib.import_module(f".{name}", __package__).run(
                0.0 if tiny else scale * seconds, **small if tiny else {}
            )
        for result in found.values():
            console.print(table(result))
        console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s[/dim]\n")
        results |= found
    return results


def picture(results: dict[str, Any], folder: Path) -> Path | None:
    growths = {name: result for name, result in results.items() if isinstance(result, Growth)}
    if not growths:
        return None
    draw(growths, results.get("patch time"), folder / "growth.png")
    return folder / "growth.png"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1: the same on every machine)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the seconds spent on each section")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the files")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; choose of {', '.join(SECTIONS)}")
    torch.set_num_threads(args.threads)
    console, start = Console(), time.perf_counter()
    console.print("  ".join(f"{name} {value}" for name, value in machine().items()), "\n")
    results = run(args.sections or list(SECTIONS), args.scale, console=console)
    judged = verdicts(results)
    write(results, judged, args.output)
    drawn = picture(results, args.output)
    console.print(budget_table(judged))
    files = ["results.json", "tables.txt", *([drawn.name] if drawn else [])]
    console.print(f"{time.perf_counter() - start:.0f} s; {', '.join(files)} in {args.output}")


if __name__ == "__main__":
    main()
