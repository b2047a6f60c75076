"""The experiments of "The Affine Divergence" (arXiv 2512.22247) on CIFAR-10: does correcting the divergence pay?

A step of SGD on one sample moves the output of an affine map by −η(‖x‖² + 1)δ, so a sample counts by the length of its
input. Fully connected (fc) nets are trained with each correction of that: affine-like layers (−ηδ), norm-like layers
(−2ηδ), BatchNorm, LayerNorm, RMSNorm, none; conv nets with PatchNorm in both forms.

    python training/affine_divergence.py --scale cpu --workers 2 [--data_dir DIR] [--output_dir DIR]
    python training/affine_divergence.py --scale cpu --report         # tables and pictures again, without a run

`--scale smoke` takes seconds and says nothing; `cpu` takes about 35 minutes on two cores (10,240 training images, 4
epochs, 3 seeds); `full`, some 5,000 runs, is for a GPU (`--device cuda`). Each run is one line of `runs.jsonl` in the
output folder; started again, it does what is missing. `report.md` and the pictures are made from these lines alone.

What is decided, and why:

- Every affine map is corrected, the first and the output layer too: the divergence is in each of them, and largest
  where the input is longest, at the pixels. No gain is learned; affine-like and norm-like layers have gain 1.
- At one seed all methods start from the same weights (He's, zero bias: what the uncorrected net wants) and see the
  same batches, so that methods are compared in pairs. Plain SGD: no momentum, decay, schedule or augmentation.
- The best learning rates lie up to 30-fold apart (the input of an affine map is √n times longer after LayerNorm than
  in a norm-like layer). So each method gets its own, by validation accuracy at the first seed, from one grid for all:
  a climb from one start, until both neighbours of the best are worse. The test images choose nothing.
- It is chosen on the middle net for each activation and, since a claim on batch sizes would otherwise be one on
  learning rates, again for each batch size. At `cpu` the other widths and depths take the middle net's; at `full`
  each net chooses its own.
- `norm_like_half` is not searched: it takes half the rate of affine-like, at which the theory has both move equally
  far. `norm_like` is searched like the others.
- Batch sizes are compared at equal epochs. Large ones then take few steps, which costs every method accuracy; so the
  slope of a corrected layer is also compared with that of the uncorrected net.
- A run whose loss or output is not finite counts with the accuracy of chance. The training images are a multiple of
  the largest batch: no smaller last one.
"""

import gc
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import HfArgumentParser

from training.divergence_report import FIXED, write_report
from training.divergence_statistics import best_rate
from training.divergence_training import HUB_ID, METHODS, Run, load_images, train
from training.records import drop_torn_line, read_records


@dataclass(frozen=True)
class Family:
    """The nets of one kind: widths at the middle depth and depths at the middle width, or all of them together."""

    activations: tuple[str, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    middle: tuple[int, int]  # (width, depth)
    batch_sizes: tuple[int, ...]  # on the middle net, with the last activation


@dataclass(frozen=True)
class Scale:
    fc: Family
    conv: Family
    counts: dict[str, int]  # images by split
    epochs: int
    seeds: int
    batch_size: int  # wherever it is not what varies
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    first_rate: float = 0.1
    search_every_net: bool = False
    all_nets: bool = False


POWERS = (16, 32, 64, 128, 256, 512, 1024)
SCALES = {
    "smoke": Scale(
        fc=Family(("tanh", "leaky_relu"), (8, 16), (1, 2), (8, 1), (16, 64)),
        conv=Family(("leaky_relu",), (4,), (2,), (4, 2), (16, 64)),
        counts={"train": 64, "validation": 32, "test": 32},
        epochs=1,
        seeds=2,
        batch_size=16,
        rates=(0.1, 0.3),
    ),
    "cpu": Scale(
        fc=Family(("tanh", "leaky_relu"), (16, 64, 256), (2, 4, 8), (64, 4), (16, 64, 256, 1024)),
        conv=Family(("leaky_relu",), (8,), (3,), (8, 3), (16, 64, 256, 1024)),
        counts={"train": 10_240, "validation": 5_000, "test": 10_000},
        epochs=4,
        seeds=3,
        batch_size=64,
    ),
    "full": Scale(
        fc=Family(("tanh", "leaky_relu"), (32, 64, 128, 256, 512, 1024), (1, 2, 3, 4, 6, 8), (256, 4), POWERS),
        conv=Family(("tanh", "leaky_relu"), (16, 32, 64), (2, 3, 4), (32, 3), POWERS),
        counts={"train": 45_056, "validation": 4_944, "test": 10_000},
        epochs=30,
        seeds=5,
        batch_size=64,
        search_every_net=True,
        all_nets=True,
    ),
}


@dataclass
class Arguments:
    scale: str = field(default="cpu", metadata={"help": "How much to run.", "choices": list(SCALES)})
    data_dir: str | None = field(default=None, metadata={"help": f"Local folder with the layout of {HUB_ID}."})
    output_dir: str | None = field(default=None, metadata={"help": "Default: runs/affine_divergence/SCALE."})
    workers: int = field(default=1, metadata={"help": "Processes on the CPU, of one thread each."})
    device: str = field(default="cpu", metadata={"help": "Where to train; on a GPU one run after the other."})
    report: bool = field(default=False, metadata={"help": "Run nothing; tables and pictures of the runs there are."})


def main(argv: list[str] | None = None) -> Path:
    """Returns the report's path."""
    (args,) = HfArgumentParser(Arguments, allow_abbrev=False).parse_args_into_dataclasses(argv)
    if args.workers < 1 or (args.workers > 1 and args.device != "cpu"):
        raise ValueError(f"workers={args.workers} on {args.device}: at least 1, and exactly 1 on a GPU.")
    folder = Path(args.output_dir or f"runs/affine_divergence/{args.scale}")
    path = folder / "runs.jsonl"
    if not args.report:
        folder.mkdir(parents=True, exist_ok=True)
        run_all(SCALES[args.scale], args, path)
    elif not path.is_file():
        raise ValueError(f"{path} does not exist; run without --report first.")
    return write_report(read_records(path), folder)


def run_all(scale: Scale, args: Arguments, path: Path) -> None:
    """Appends a line to `path` for every run of the plan that is not in it."""
    if args.workers > 1:
        torch.set_num_threads(1)  # before any work: a process with a pool of threads must not be forked
    source = Path(args.data_dir).name if args.data_dir else HUB_ID
    plan = asdict(cells(scale, source)[0])
    for record in read_records(path):
        for name in FIXED:
            if record[name] != plan[name]:
                raise ValueError(
                    f"{path} holds runs with {name}={record[name]!r}, not {plan[name]!r}: another --scale or "
                    "other data. Give another --output_dir."
                )
    images = load_images(args.data_dir, scale.counts, path.with_name("images.pt"))
    global DATA
    DATA = images.to_float(args.device)
    gc.collect()
    gc.freeze()  # `patch` looks through the heap for models around its own; there is none in what was made so far
    drop_torn_line(path)
    done = {as_run(record): record for record in read_records(path)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress, path.open("a", encoding="utf-8") as file:
        bar = progress.add_task("runs", total=None)
        while runs := next_runs(scale, source, done):
            finished, expected = count_runs(scale, source, done)
            progress.update(bar, completed=finished, total=expected)
            for run, outcome in run_each(runs, args.workers):
                record = asdict(run) | outcome
                done[run] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                label = f"{run.family} {run.activation} {run.width}x{run.depth} {run.method} batch {run.batch_size}"
                progress.update(bar, advance=1, description=label)


def run_each(runs: list[Run], workers: int) -> Iterator[tuple[Run, dict]]:
    """Each run with its outcome, as they end."""
    if workers == 1:
        yield from ((run, train(run, DATA)) for run in runs)
        return
    # Forked, the workers share the images; nothing was differentiated before, after which torch forbids a fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=start_worker) as pool:
        futures = {pool.submit(train_forked, run): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def start_worker() -> None:
    torch.set_num_threads(1)


def train_forked(run: Run) -> dict:
    return train(run, DATA)


def nets(family: Family, all_nets: bool) -> list[tuple[int, int]]:
    """(width, depth) of each net."""
    return [
        (w, d)
        for w in family.widths
        for d in family.depths
        if all_nets or w == family.middle[0] or d == family.middle[1]
    ]


def cells(scale: Scale, source: str) -> list[Run]:
    """One run for each method in each setting, its learning rate and seed still open (0)."""
    settings = []
    for name, family in (("fc", scale.fc), ("conv", scale.conv)):
        for activation in family.activations:
            settings += [(name, activation, *net, scale.batch_size) for net in nets(family, scale.all_nets)]
        settings += [(name, family.activations[-1], *family.middle, size) for size in family.batch_sizes]
    return [
        Run(name, activation, method, width, depth, batch, 0.0, 0, scale.epochs, *scale.counts.values(), source)
        for name, activation, width, depth, batch in dict.fromkeys(settings)
        for method in METHODS
    ]


def next_runs(scale: Scale, source: str, done: dict[Run, dict]) -> list[Run]:
    """What can be run now that these are done, the long ones first; empty at the end of the experiment."""
    tried = rates_tried(done)
    runs: dict[Run, None] = {}
    for cell in cells(scale, source):
        rate, missing = choose_rate(cell, scale, tried)
        runs.update({replace(cell, lr=lr): None for lr in missing})
        if rate is not None:
            runs.update({replace(cell, lr=rate, seed=seed): None for seed in range(scale.seeds)})
    return sorted((run for run in runs if run not in done), key=lambda run: (run.batch_size, -run.width * run.depth))


def rates_tried(done: dict[Run, dict]) -> dict[Run, dict[float, dict]]:
    """By cell: learning rate -> record, of the first seed."""
    tried: dict[Run, dict[float, dict]] = {}
    for run, record in done.items():
        if run.seed == 0:
            tried.setdefault(replace(run, lr=0.0), {})[run.lr] = record
    return tried


def choose_rate(cell: Run, scale: Scale, tried: dict[Run, dict[float, dict]]) -> tuple[float | None, list[float]]:
    """(the learning rate of a cell, or None as long as it is open; those to try next)."""
    if cell.method == "norm_like_half":
        rate, _ = choose_rate(replace(cell, method="affine_like"), scale, tried)
        return rate and rate / 2, []
    start: float | None = scale.first_rate
    width, depth = (scale.fc if cell.family == "fc" else scale.conv).middle
    middle = replace(cell, width=width, depth=depth, batch_size=scale.batch_size)
    if cell != middle:
        start, missing = choose_rate(middle, scale, tried)
        if cell.batch_size == scale.batch_size and not scale.search_every_net:
            return start, []
    if start is None:
        return None, []
    best = best_rate(tried[cell].values()) if cell in tried else start
    index = scale.rates.index(best)
    around = scale.rates[max(0, index - 1) : index + 2]
    missing = [rate for rate in around if rate not in tried.get(cell, {})]
    return (None, missing) if missing else (best, [])


def count_runs(scale: Scale, source: str, done: dict[Run, dict]) -> tuple[int, int]:
    """(runs of the plan that are done, all runs as far as the plan can be foreseen)."""
    tried = rates_tried(done)
    plan = cells(scale, source)
    in_plan = set(plan)
    finished = sum(replace(run, lr=0.0, seed=0) in in_plan for run in done)
    undecided = sum(choose_rate(cell, scale, tried)[0] is None for cell in plan)
    return finished, finished + len(next_runs(scale, source, done)) + undecided * (scale.seeds - 1)


def as_run(record: dict) -> Run:
    return Run(**{f.name: record[f.name] for f in fields(Run)})


DATA: dict = {}  # by split, (images, labels): for the forked workers

if __name__ == "__main__":
    main()
