"""How to walk a pretrained model over to a patch: a short distillation from itself, four ways at equal steps.

The starts are calibrated or uncalibrated; the strength is 1 from the first step (abrupt) or climbs there from 0 over
60 % of the steps (ramp). Each patched model learns the original's token embeddings; measured is the mean cosine of its
sentence embeddings with the original's on 512 sentences it has not seen, at full strength at the end, and at the
present strength on the way (can the model be used while it trains?).

    python training/distill.py --data_dir DIR --patches dyt affine_like --seeds 0 1 2

Each way gets the learning rate that is best for it on other held-out sentences, from the same grid, on the first seed.
One JSON line a run goes to `OUTPUT_DIR/runs.jsonl`; runs that are there already are not made again. `--report` draws
the table from it alone.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from transformers import (
    AutoModel,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers import logging as transformers_logging

from hf_autonorm import GateConfig, PatchConfig, StrengthRampCallback, calibrate, patch, set_strength
from hf_autonorm.hub.reading import load_tokenizer
from training.embeddings import batched, embed
from training.models import resolve_model
from training.records import drop_torn_line, read_records
from training.variants import VARIANTS

HUB_ID = "stanfordnlp/sst2"
WAYS = [(start, walk) for start in ("calibrated", "uncalibrated") for walk in ("ramp", "abrupt")]
RAMP = 0.6  # of the steps
LOOKS = 6  # on the way, at even distances
# What takes the place of the model's own; a freeze decision has no place in a run of one epoch.
PATCHES = [name for name, variant in VARIANTS.items() if variant.patch is not None and variant.freeze != "rule"]


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse_args(argv)
    file = args.output_dir / "runs.jsonl"
    runs = read_records(file)
    if not args.report:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        texts = load_texts(args)
        settings = {name: getattr(args, name) for name in ("model", "steps", "batch_size", "calibration_texts")}
        settings["data"] = Path(args.data_dir).resolve().name if args.data_dir else HUB_ID
        settings["unseen_texts"] = len(texts["unseen"])
        ways = [(name, *way) for name in args.patches for way in WAYS]
        total = len(ways) * (len(args.learning_rates) + len(args.seeds) - 1)
        drop_torn_line(file)
        with Progress() as progress, file.open("a", encoding="utf-8") as out:
            bar = progress.add_task("distillation", total=total)
            for name, start, walk in ways:
                mine = {"patch": name, "start": start, "walk": walk, **settings}
                # Every learning rate on the first seed; the best one on the others.
                for lr in args.learning_rates:
                    run_once({**mine, "lr": lr, "seed": args.seeds[0]}, texts, runs, out)
                    progress.advance(bar)
                best = best_rate(runs, mine)
                for seed in args.seeds[1:]:
                    run_once({**mine, "lr": best, "seed": seed}, texts, runs, out)
                    progress.advance(bar)
    if not runs:
        raise ValueError(f"{file} holds no run; run without --report first.")
    Console(width=120).print(report(runs))
    return runs


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="an encoder: a folder, a Hub id, or minilm (from PyPI)")
    parser.add_argument("--data_dir", help="a folder with SST-2's files; without it they come from the Hub")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/distill"))
    parser.add_argument("--patches", nargs="+", default=["dyt", "affine_like", "norm_like"], choices=PATCHES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-4, 3e-4])
    parser.add_argument("--calibration_texts", type=int, default=128)
    parser.add_argument("--unseen", type=int, default=512, help="sentences to measure on")
    parser.add_argument("--report", action="store_true", help="train nothing, draw the table")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "calibration_texts", "unseen"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: at least 1.")
    return args


def load_texts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Sentences to calibrate and train on (fit), to choose by (held_out) and to report on (unseen); no two overlap."""
    from datasets import load_dataset

    splits = load_dataset(args.data_dir or HUB_ID)
    if missing := {"train", "validation", "test"} - set(splits):
        raise ValueError(f"{args.data_dir or HUB_ID} has no split {', '.join(sorted(missing))}; SST-2 has all three.")
    column = "sentence" if "sentence" in splits["train"].column_names else "text"
    wanted = args.steps * args.batch_size + args.calibration_texts
    if wanted > len(splits["train"]):
        raise ValueError(
            f"steps × batch_size + calibration_texts are {wanted} sentences; the training split has "
            f"{len(splits['train'])}. Each is seen once: take fewer steps."
        )
    fit = random.Random(0).sample(list(splits["train"][column]), wanted)
    others = random.Random(0).sample(list(splits["validation"][column]), min(128, len(splits["validation"])))
    # The Hub's test split has sentences, its labels are hidden: they are not needed here.
    unseen = random.Random(0).sample(list(splits["test"][column]), min(args.unseen, len(splits["test"])))
    return {"calibration": fit[: args.calibration_texts], "fit": fit[args.calibration_texts :], "held_out": others,
            "unseen": unseen}  # fmt: skip


def run_once(setting: dict, texts: dict[str, list[str]], runs: list[dict], out) -> None:
    """Makes a run, unless it is in `runs`; adds it there and to the file."""
    if not any(setting.items() <= run.items() for run in runs):
        run = setting | distill(setting, texts)
        runs.append(run)
        out.write(json.dumps(run) + "\n")
        out.flush()


def distill(setting: dict, texts: dict[str, list[str]]) -> dict:
    """One run: cosines with the original, at the start, on the way, and at the end."""
    path = resolve_model(setting["model"])
    tokenizer = load_tokenizer(path)
    teacher = AutoModel.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    student = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the teacher has none
    variant = VARIANTS[setting["patch"]]
    fields = {"norm": "autonorm", "seed": setting["seed"]} | variant.patch
    patch(student, config=PatchConfig(**fields, gate=GateConfig(**variant.gate)))
    if setting["start"] == "calibrated":
        calibrate(student, batched(tokenizer, texts["calibration"], 32))
    wanted = {name: embed(teacher, tokenizer, texts[name]) for name in ("held_out", "unseen")}

    def cosine(name: str) -> float:
        student.eval()
        return (embed(student, tokenizer, texts[name]) * wanted[name]).sum(-1).mean().item()

    result = {"at_start": cosine("unseen")}
    look = LookCallback(lambda: cosine("held_out"))
    callbacks = [look]
    if setting["walk"] == "ramp":
        set_strength(student, 0.0)
        callbacks.append(StrengthRampCallback(end=1.0, ratio=RAMP))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=setting["steps"],
            per_device_train_batch_size=setting["batch_size"],
            learning_rate=setting["lr"],
            warmup_steps=setting["steps"] // 10,
            seed=setting["seed"],
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = DistillationTrainer(
            teacher,
            model=student,
            args=arguments,
            train_dataset=[tokenizer(text, truncation=True) for text in texts["fit"]],
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    set_strength(student, 1.0)
    result |= {"held_out": cosine("held_out"), "unseen": cosine("unseen"), "worst_on_the_way": min(look.seen)}
    return result | {"on_the_way": look.seen, "loss": loss if math.isfinite(loss) else None}


class DistillationTrainer(Trainer):
    """Mean squared distance between the student's and the teacher's token embeddings, padding left out."""

    def __init__(self, teacher: nn.Module, **kwargs) -> None:
        super().__init__(**kwargs)
        self.teacher = teacher

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            wanted = self.teacher(**inputs).last_hidden_state
        mask = inputs["attention_mask"].bool()
        outputs = model(**inputs)
        loss = nn.functional.mse_loss(outputs.last_hidden_state[mask], wanted[mask]) / wanted[mask].var()
        return (loss, outputs) if return_outputs else loss


class LookCallback(TrainerCallback):
    """What the model is worth on the way, at its present strength."""

    def __init__(self, measure) -> None:
        self.measure, self.seen = measure, []

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step % max(1, state.max_steps // LOOKS) == 0:
            self.seen.append(self.measure())
            model.train()


def best_rate(runs: list[dict], setting: dict) -> float:
    """The learning rate with the best held-out cosine; a run that diverged is never the best."""
    mine = [run for run in runs if setting.items() <= run.items()]
    return max(mine, key=lambda run: run["held_out"] if math.isfinite(run["held_out"]) else -1.0)["lr"]


def report(runs: list[dict]) -> Table:
    """Mean over seeds of each way, at its best learning rate, with the range over the seeds."""
    steps = {(run["steps"], run["batch_size"]) for run in runs}
    sizes = ", ".join(f"{a} steps of {b} sentences" for a, b in sorted(steps))
    table = Table(title=f"cosine with the original, {sizes}: mean over seeds (lowest to highest)")
    for column in (
        "patch",
        "start",
        "walk",
        "lr",
        "seeds",
        "at start, λ = 1",
        "worst on the way",
        "at the end, λ = 1",
    ):
        table.add_column(column, justify="left" if column in ("patch", "start", "walk") else "right")
    keys = ("patch", "start", "walk", "model", "data", "steps", "batch_size", "calibration_texts", "unseen_texts")
    for way in dict.fromkeys(tuple(run[key] for key in keys) for run in runs):
        setting = dict(zip(keys, way))
        rate = best_rate(runs, setting)
        mine = [run for run in runs if (setting | {"lr": rate}).items() <= run.items()]
        end = [run["unseen"] for run in mine]
        table.add_row(
            *way[:3], f"{rate:g}", str(len(mine)),
            *(f"{statistics.mean(run[name] for run in mine):.4f}" for name in ("at_start", "worst_on_the_way")),
            f"{statistics.mean(end):.4f} ({min(end):.4f} to {max(end):.4f})",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
