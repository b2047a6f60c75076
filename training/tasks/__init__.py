"""One file a task. Each has `load(args: DataArguments, training_args) -> Task`; a new file is a new `--task`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TASKS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


@dataclass
class Task:
    """What `Trainer` needs, beside its own arguments, to learn this task."""

    model: object  # with a fresh head; drawn from the global random state
    processing_class: object  # tokenizer or image processor, saved beside the model
    splits: object  # DatasetDict of train, validation and test; rows have what the model's forward takes, and no more
    data_collator: Callable
    compute_metrics: Callable
    dataset: dict  # for the model card: `name`, and `type` (a Hub id) and `config` where it is from the Hub
    preprocess_logits_for_metrics: Callable | None = None
    augmented: object | None = None  # the training split as training sees it, where that differs
    compute_loss: Callable | None = None  # instead of the model's own; as Trainer's `compute_loss_func`
    callbacks: list = field(default_factory=list)


def load_task(args, training_args) -> Task:
    return importlib.import_module(f"training.tasks.{args.task}").load(args, training_args)


def take(splits, max_train: int | None, max_eval: int | None):
    """At most so many rows of each split, drawn by a fixed seed: files are often sorted."""
    for name, split in splits.items():
        limit = max_train if name == "train" else max_eval
        if limit is not None and limit < len(split):
            splits[name] = split.shuffle(seed=0).select(range(limit))
    return splits
