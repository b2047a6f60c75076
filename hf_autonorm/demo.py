"""`hf-autonorm demo`: the whole way of a patched model, on a real pretrained one, in a few minutes on a CPU.

all-MiniLM-L6-v2 learns the sentiment of single English words as ten people rated each (vaderSentiment's lexicon), once
with its own LayerNorms and once patched with AutoNorm-S. Model and data come out of two PyPI packages.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from .demo_task import (
    BASE_MODEL,
    EXAMPLES,
    LABELS,
    QUICK,
    SEED,
    Scale,
    drift,
    encode,
    fine_tune,
    leave_run,
    load_model,
    load_words,
    logits,
    predict,
    reload_elsewhere,
    require_packages,
)  # fmt: skip


def run(
    output: str | os.PathLike = "runs/demo", quick: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Runs the demo, narrating on the console; leaves the model, its card and `results.json` in `output`."""
    console = console or Console()
    require_packages()
    Path(output).mkdir(parents=True, exist_ok=True)  # before the minutes of work: it may be a file, or not ours
    with _only_our_words():
        return _run(Path(output), QUICK if quick else Scale(), console)


def _run(output: Path, scale: Scale, console: Console) -> dict[str, Any]:
    from . import GateFreezeCallback, calibrate, gates, patch, plan, save_pretrained, set_strength
    from .report import write_report

    began = time.perf_counter()
    _say(
        console,
        "1. A pretrained model",
        f"{BASE_MODEL} with a fresh head, and the sentiment of words.",
    )
    tokenizer, model = load_model()
    splits = load_words(scale)
    sizes = ", ".join(f"{len(words)} {name}" for name, words in splits.items())
    console.print(f"Words: {sizes} (split by their first four letters, so that no word family is in both).")

    _say(console, "2. The plan", "hf_autonorm.plan(model): what would be patched; nothing has changed yet.")
    rows = plan(model)
    console.print(rows.table())

    _say(console, "3. Patched in one line", "patch(model) wraps each norm; at strength 0 nothing may have changed.")
    baseline = copy.deepcopy(model)
    model = patch(model)
    batch = encode(tokenizer, [word for word, _ in splits["test"][:32]])
    set_strength(model, 0.0)
    unchanged = torch.equal(logits(model, batch), logits(baseline, batch))
    set_strength(model, 1.0)
    console.print(f"Strength 0: logits of 32 words equal the unpatched model's, bit for bit: {_yes(unchanged)}.")
    shift = (logits(model, batch) - logits(baseline, batch)).abs().max().item()
    console.print(f"Strength 1: they differ by up to {shift:.2g}; the next step is there to lessen that.")

    _say(
        console,
        "4. Calibration",
        "calibrate(model.base_model, batches) fits each branch to its norm, without training.",
    )
    size = scale.batch_size
    words = [word for word, _ in splits["train"]]
    batches = [encode(tokenizer, words[i * size : (i + 1) * size]) for i in range(scale.calibration_batches)]
    some = [word for word, _ in splits["test"][:96]]
    held_out = [encode(tokenizer, some[start : start + size]) for start in range(0, len(some), size)]
    drift_before = drift(model, baseline, held_out)
    report = calibrate(model.base_model, batches)
    drift_after = drift(model, baseline, held_out)
    console.print(report.table())
    console.print(
        f"Word embeddings, cosine with the original's on words not used here: {drift_before:.5f} before, "
        f"[b]{drift_after:.5f}[/b] after."
    )

    _say(
        console,
        "5. Fine-tuning, side by side",
        f"LayerNorm and AutoNorm-S: seed {SEED}, the same words in one order.",
    )
    callback = GateFreezeCallback(freeze_epoch=1, entropy_threshold=0.1)
    seconds, states = {}, {}
    with _progress(console) as progress:
        for name, candidate, callbacks in (("LayerNorm", baseline, []), ("AutoNorm-S", model, [callback])):
            seconds[name], states[name] = fine_tune(
                name, candidate, callbacks, tokenizer, splits["train"], scale, progress
            )
    models = {"LayerNorm": baseline, "AutoNorm-S": model}
    correct = {name: predict(candidate, tokenizer, splits["test"]) for name, candidate in models.items()}
    accuracies = {name: sum(right) / len(right) for name, right in correct.items()}
    console.print(_results_table(accuracies, seconds, models))
    console.print(_verdict(correct["LayerNorm"], correct["AutoNorm-S"], scale))

    _say(console, "6. What the gates did", "gates(model): mean weights and entropy, and whether they were frozen.")
    table = gates(model)
    weight = sum(row.weights["norm"] for row in table) / len(table)
    entropy = sum(row.entropy for row in table) / len(table)
    console.print(
        f"Mean weight of the original norm {weight:.4f} (0.9 at the start), mean entropy {entropy:.4f} nats "
        f"(the most that two choices can have is {math.log(2):.2f})."
    )
    console.print(f"Freeze decision: {callback.describe()}")
    table.plot(str(output / "gates.png"))
    console.print(f"Plot: {output / 'gates.png'}", markup=False)

    _say(
        console,
        "7. Saved and reloaded",
        "Stock AutoModelForSequenceClassification, in a new process.",
    )
    folder = save_pretrained(
        model,
        output / "model",
        metrics={"accuracy": accuracies["AutoNorm-S"]},
        baseline={"accuracy": accuracies["LayerNorm"]},
        base_model=BASE_MODEL,
        dataset={"name": "Word ratings of vaderSentiment 3.3.2", "split": "test"},
        command="hf-autonorm demo",
        callbacks=[callback],
        tokenizer=tokenizer,
    )
    expected = logits(model, encode(tokenizer, EXAMPLES))
    reloaded = reload_elsewhere(folder)
    difference = (reloaded - expected).abs().max().item()
    equal = torch.equal(reloaded, expected)
    same = "equal, bit for bit" if equal else f"equal up to {difference:.1g}"
    for word, row in zip(EXAMPLES, expected.softmax(-1).tolist()):
        console.print(f"  {word:12s} {LABELS[row[1] > row[0]]} ({max(row):.2f})")
    console.print(f"Logits before saving and in the new process: {same}.")
    leave_run(output / "layer_norm", states["LayerNorm"], accuracies["LayerNorm"])
    leave_run(
        folder,
        states["AutoNorm-S"],
        accuracies["AutoNorm-S"],
        freeze_decision=callback.decision,
        gate_history=callback.history,
        settings={"baseline": "layer_norm"},
    )
    page = write_report(folder)

    results = {
        "accuracy": accuracies,
        "seconds": seconds,
        "strength_0_is_the_original": unchanged,
        "cosine": {"before": drift_before, "after": drift_after},
        "r2": {row.name: row.r2 for row in report.rows},
        "gates": {"norm_weight": weight, "entropy": entropy},
        "freeze_decision": callback.decision,
        "reload_difference": difference,
        "scale": {**vars(scale), "seed": SEED, "test_words": len(splits["test"])},
        "total_seconds": time.perf_counter() - began,
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _say(console, "What to try next", f"({results['total_seconds']:.0f} s so far.)")
    console.print(_NEXT.format(folder=folder, page=page), soft_wrap=True, markup=False)
    return results


_NEXT = """  This run on one page: {page}
  The model card:       {folder}/README.md
  Every gate:           hf-autonorm gates {folder}
  Your own model:       hf-autonorm plan FOLDER_OR_HUB_ID
  DyT instead of norms: hf-autonorm patch FOLDER_OR_HUB_ID OUT --norm dyt --texts FILE
  In Python:            from hf_autonorm import patch; model = patch(model)"""


# --- on the console --------------------------------------------------------------------------------------------------


def _say(console: Console, title: str, text: str) -> None:
    console.print()
    console.rule(f"[b]{title}[/b]", align="left")
    console.print(text, highlight=False)


def _yes(value: bool) -> str:
    return "[b green]yes[/b green]" if value else "[b red]NO[/b red]"


def _progress(console: Console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:10s}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def _results_table(accuracies: dict[str, float], seconds: dict[str, float], models: dict[str, nn.Module]) -> Table:
    table = Table()
    for column in ("", "test accuracy", "parameters", "seconds"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, value in accuracies.items():
        parameters = sum(p.numel() for p in models[name].parameters())
        table.add_row(name, f"{value:.4f}", f"{parameters:,}", f"{seconds[name]:.0f}")
    return table


def _verdict(layer_norm: list[bool], autonorm: list[bool], scale: Scale) -> str:
    """Who is ahead, if a 95 % interval of the paired difference says that anybody is."""
    count = len(autonorm)
    difference = (sum(autonorm) - sum(layer_norm)) / count
    disagree = sum(a != b for a, b in zip(autonorm, layer_norm))
    interval = 1.96 * (disagree - count * difference**2) ** 0.5 / count
    sure = abs(difference) > interval
    verdict = ("AutoNorm-S is ahead" if difference > 0 else "LayerNorm is ahead") if sure else "No difference is shown"
    return (
        f"{verdict}: AutoNorm-S − LayerNorm = {difference:+.4f}, paired 95 % interval ±{interval:.4f} "
        f"({count} test words, {disagree} judged differently). One seed ({SEED}), {scale.train_words} training words, "
        f"{scale.epochs} epochs: an example, not a finding."
    )


@contextlib.contextmanager
def _only_our_words():
    """Keeps the libraries' progress bars, reports and warnings off the console."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
