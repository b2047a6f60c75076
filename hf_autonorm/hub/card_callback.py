"""Collects, while a Trainer trains, what the model card should tell of it."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from .facts import TrainingFacts

_NOT_RESULTS = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time", "total_flos")


class ModelCardCallback(TrainerCallback):
    """Fills a model card while training: pass it to Trainer, and then to `save_pretrained(…, callbacks=[…])`.

        card = ModelCardCallback(base_model="owner/name", dataset="owner/data", baseline={"accuracy": 0.90})
        Trainer(…, callbacks=[card]).train()
        save_pretrained(model, "my-model", callbacks=[card])

    Results are those of the model that is saved: an evaluation after training, else that of the best checkpoint (with
    `load_best_model_at_end`) or of the last step. Hyperparameters, evaluations, time and hardware come from the run.
    What is given to `save_pretrained` itself wins over what is given here.

    Args:
        base_model: as in `save_pretrained`; so are the next three.
        dataset: where the metrics are from.
        baseline: metrics of the model that this one is compared with.
        license: for the card's metadata.
        command: default: `python SCRIPT …` as it was typed, where the script lies below the current folder.

    Attributes:
        facts: the `TrainingFacts`.
    """

    def __init__(
        self,
        base_model: str | None = None,
        dataset: str | Mapping[str, str] | None = None,
        baseline: Mapping[str, float] | None = None,
        license: str | None = None,
        command: str | None = None,
    ) -> None:
        self.facts = TrainingFacts(base_model, dataset, baseline, license, command or typed_command())
        self._ended = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ended = False
        facts = self.facts
        facts.metrics, facts.hardware = {}, hardware(args)
        facts.resumed_from = state.global_step or None
        facts.hyperparameters = extract_hyperparameters_from_trainer(SimpleNamespace(args=args))
        if "optimizer" in facts.hyperparameters:
            name = str(getattr(args.optim, "value", args.optim))
            facts.hyperparameters["optimizer"] = facts.hyperparameters["optimizer"].replace(f"{args.optim}", name)
        if args.bf16:
            facts.hyperparameters["mixed_precision_training"] = "bfloat16"
        if args.weight_decay:
            facts.hyperparameters["weight_decay"] = args.weight_decay
        rows = getattr(kwargs.get("train_dataloader"), "dataset", None)
        facts.examples = len(rows) if hasattr(rows, "__len__") else None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        facts = self.facts
        facts.evaluations = evaluations(state.log_history)
        facts.seconds = next((e["train_runtime"] for e in state.log_history[::-1] if "train_runtime" in e), None)
        of_step = state.best_global_step if args.load_best_model_at_end else state.global_step
        for entry in facts.evaluations:
            if entry["step"] == of_step:
                facts.metrics = {name: v for name, v in entry.items() if name not in ("epoch", "step", "train_loss")}
        self._ended = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._ended and metrics:
            self.facts.metrics |= results(metrics)  # of several data sets, one by one


def results(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What was scored, without the prefix of its split and without how long it took."""
    names = [name for name in metrics if name != "epoch"]
    prefix = names[0].split("_")[0] + "_" if names else ""
    plain = {
        name.removeprefix(prefix) if all(n.startswith(prefix) for n in names) else name: metrics[name]
        for name in names
    }
    return {name: v for name, v in plain.items() if not name.endswith(_NOT_RESULTS) and isinstance(v, (int, float))}


def evaluations(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of a run, each with the training loss logged last before it; two of one step are one."""
    rows: dict[int, dict[str, Any]] = {}
    loss = None
    for entry in log_history:
        loss = entry.get("loss", loss)
        scored = results({name: value for name, value in entry.items() if name.startswith("eval_")})
        if scored:
            known = rows.setdefault(
                entry["step"], {"epoch": entry.get("epoch"), "step": entry["step"], "train_loss": loss}
            )
            known.update(scored)
    return list(rows.values())


def hardware(args: TrainingArguments) -> str:
    """`2 × NVIDIA A100-SXM4-80GB`, or the kind of CPU and the threads torch may use."""
    count = max(1, args.world_size, args.n_gpu)
    times = f"{count} × " if count > 1 else ""
    if args.device.type == "cuda":
        return times + torch.cuda.get_device_name(args.device)
    return f"{times}{args.device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"


def typed_command() -> str | None:
    """The command line of this process, where it runs a script below the current folder (no path of a home)."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file():
        return None
    try:
        script = script.resolve().relative_to(Path.cwd())
    except ValueError:
        return None
    return shlex.join(["python", script.as_posix(), *sys.argv[1:]])
