"""Variants x seeds of one recipe, compared in pairs: the same seed draws the same head, data order and dropout.

    python training/compare.py --recipe training/recipes/pos_ewt.yaml --scale cpu --workers 2 \
        --variants ln,dyt,autonorm,autonorm_s --seeds 3 [--data_dir DIR] [any option of train.py]

Each run is one of `training/train.py`, in a process of its own, and one line of `runs.jsonl` in the output folder;
started again, it does what is missing. `ln` (the model as it is) runs first: every other variant is compared with it.
At the end it writes `report.md` and the pictures from these lines alone: means with 95 % intervals, paired tests
against `ln`, gate entropy by epoch, norm weight by layer. `--report` runs nothing: it puts these, the lines, and the
model card of the best run under `model_cards/`.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from training.comparison import publish, write_report
from training.records import drop_torn_line, read_records
from training.variants import VARIANTS

# VARIANT+calibrated+ramp: how a pretrained model is walked over, as options of train.py.
WAYS = {
    "calibrated": ["--calibrate", "16"],  # batches of the training data
    "ramp": ["--strength", "0", "--strength_ramp_ratio", "0.5"],
}
SCALES = Path(__file__).parent / "scales.yaml"
# A run is short and done again if it is broken off; and nobody reads its progress bar.
QUIET = ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true", "--log_level", "error"]


def main(argv: list[str] | None = None) -> Path:
    """Returns the report's path."""
    args, overrides = parse_args(argv)
    folder = Path(args.output_dir or f"runs/compare/{Path(args.recipe).stem}-{args.scale}")
    path = folder / "runs.jsonl"
    if args.report:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; run without --report first.")
        others = {record["recipe"] for record in read_records(path)} - {Path(args.recipe).stem}
        if others:
            raise ValueError(f"{path} holds runs of {', '.join(sorted(others))}, not of {Path(args.recipe).stem}.")
        return publish(folder, Path(args.cards_dir, folder.name))
    folder.mkdir(parents=True, exist_ok=True)
    run_all(args, overrides, folder, path)
    return write_report(read_records(path), folder)


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    scales = yaml.safe_load(SCALES.read_text(encoding="utf-8"))
    parser.add_argument("--recipe", required=True, help="a YAML of training/recipes/")
    parser.add_argument(
        "--variants",
        default="ln,dyt,autonorm,autonorm_s",
        help="names by commas, with +calibrated or +ramp; ln is always run",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, …")
    parser.add_argument("--scale", default="cpu", choices=list(scales), help="see training/scales.yaml")
    parser.add_argument("--output_dir")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, of one thread each if more than one")
    parser.add_argument("--report", action="store_true", help="run nothing; publish the runs there are")
    parser.add_argument("--cards_dir", default="model_cards", help="where --report writes a folder")
    args, overrides = parser.parse_known_args(argv)
    args.variants = list(dict.fromkeys(["ln", *filter(None, map(str.strip, args.variants.split(",")))]))
    for name in args.variants:
        variant, *ways = name.split("+")
        if variant not in VARIANTS:
            raise ValueError(f"Unknown variant {variant!r}; there are {', '.join(VARIANTS)}.")
        if unknown := [way for way in ways if way not in WAYS]:
            raise ValueError(f"{name!r} ends in {unknown[0]!r}; there are {', '.join(f'+{way}' for way in WAYS)}.")
    if args.seeds < 1 or args.workers < 1:
        raise ValueError(f"--seeds {args.seeds} --workers {args.workers}: at least 1 of each.")
    for option in ("--variant", "--seed", "--config", "--baseline"):
        if any(word.split("=")[0] == option for word in overrides):
            raise ValueError(f"{option} is set for each run; see --variants, --seeds and --recipe.")
    if not Path(args.recipe).is_file():
        raise ValueError(f"There is no recipe {args.recipe}.")
    changes = scales[args.scale].get(Path(args.recipe).stem, scales[args.scale].get("default"))
    if changes is None:
        raise ValueError(f"training/scales.yaml has no scale {args.scale!r} for {Path(args.recipe).stem}.")
    # The scale first: what was typed wins.
    return args, [f"--{name}={value}" for name, value in changes.items()] + overrides


def run_all(args: argparse.Namespace, overrides: list[str], folder: Path, path: Path) -> None:
    """Appends a line to `path` for every run that is not in it."""
    asked = [(variant, seed) for variant in args.variants for seed in range(args.seeds)]
    drop_torn_line(path)
    done = set()
    for record in read_records(path):
        if (record["recipe"], record["overrides"]) != (Path(args.recipe).stem, overrides):
            other = f"{record['recipe']} with {shlex.join(record['overrides'])!r}"
            raise ValueError(f"{path} holds runs with other settings, {other}; give another --output_dir.")
        done.add((record["variant"], record["seed"]))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    threads = str(max(1, (os.cpu_count() or 1) // args.workers))
    # Spawned with their own number of threads: OpenMP reads it once.
    before, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), threads
    try:
        with (
            Progress(*columns) as progress,
            path.open("a", encoding="utf-8") as file,
            ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool,
        ):
            bar = progress.add_task(Path(args.recipe).stem, total=len(asked), completed=len(done & set(asked)))
            for first in (True, False):  # the baselines, then what is compared with them
                wanted = [run for run in asked if (run[0] == "ln") == first and run not in done]
                calls = [(args.recipe, *run, str(folder), overrides) for run in wanted]
                for record in as_they_end(pool, calls, args.workers):
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    progress.advance(bar)
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def as_they_end(pool: Executor, calls: list[tuple], at_once: int) -> Iterator[dict]:
    """What `run_once` returns for each of `calls`. After one that fails no other is begun; those that run by then are
    yielded before its error is raised."""
    waiting, running, failure = iter(calls), set(), None
    while True:
        if failure is None:
            running |= {pool.submit(run_once, *call) for call in islice(waiting, at_once - len(running))}
        if not running:
            break
        ended, running = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            if future.exception() is None:
                yield future.result()
            else:
                failure = failure or future.exception()
    if failure is not None:
        raise failure


def run_once(recipe: str, variant: str, seed: int, folder: str, overrides: list[str]) -> dict:
    """One run of train.py, in this process. Returns its results and the options that shaped them."""
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging

    from training.train import main as train

    logging.disable_progress_bar()
    disable_progress_bar()
    name, *ways = variant.split("+")
    argv = ["--config", recipe, *QUIET, *overrides, "--variant", name, "--seed", str(seed)]
    argv += [word for way in ways for word in WAYS[way]]
    argv += ["--output_dir", str(Path(folder, f"{variant}-{seed}"))]
    if variant != "ln":
        argv += ["--baseline", str(Path(folder, f"ln-{seed}"))]
    return train(argv) | {"variant": variant, "recipe": Path(recipe).stem, "overrides": overrides}


if __name__ == "__main__":
    print(main())
