"""Train a patched model by a recipe, evaluate it, save it.

A run is a recipe and a variant; every field of the recipe can be overridden (`--help` lists them, with all of
`transformers.TrainingArguments`):

    accelerate launch training/train.py --config training/recipes/word_sentiment.yaml --variant autonorm_s

    accelerate launch training/train.py --config training/recipes/pos_ewt.yaml --variant ln --seed 1 \
        --max_train_samples 2000 --num_train_epochs 1

From a local copy of the data, calibrated, walked from the original model to the patched one:

    accelerate launch training/train.py --config training/recipes/pos_ewt.yaml --data_dir DIR \
        --variant dyt --calibrate 8 --strength 0 --strength_ramp_ratio 0.6

Go on after a break (a checkpoint folder, or `last` for the newest whole one in the output folder, from the beginning
if there is none yet). The outcome has the same bits as without the break, wherever it came, as long as evaluations and
checkpoints fall together, as in the recipes: an evaluation draws a random number, and one that a checkpoint does not
yet know of is not drawn again. `group_by_length` breaks it too.

    accelerate launch training/train.py --config training/recipes/pos_ewt.yaml --resume_from_checkpoint last

One process, several (DDP), or several that share weights, gradients and optimizer state (FSDP2):

    accelerate launch --config_file training/accelerate/ddp.yaml --num_processes 4 training/train.py \
        --config training/recipes/cifar10.yaml --bf16 true

Two processes on a CPU, to try that:

    ACCELERATE_USE_CPU=true accelerate launch --config_file training/accelerate/ddp.yaml training/train.py \
        --config training/recipes/word_sentiment.yaml --use_cpu true --ddp_backend gloo

The output folder gets the model with its tokenizer and card, the checkpoints and `results.json`.
`--baseline` names the folder of an `ln` run whose numbers the card shows beside:

    accelerate launch training/train.py --config training/recipes/word_sentiment.yaml --variant autonorm_s \
        --calibrate 8 --baseline runs/word_sentiment/ln-42

Once `hf_autonorm` is imported, stock `AutoModelFor...from_pretrained` loads it.
"""

import json
import os
import platform
import shlex
import sys
import time
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

from transformers import Trainer, enable_full_determinism, set_seed

from hf_autonorm import GateFreezeCallback, ModelCardCallback, StationarityCallback, save_pretrained
from hf_autonorm.hub.facts import without_secrets
from training.arguments import parse_args, read_baseline
from training.checkpoints import find_checkpoint, require_same_patch
from training.ema import EmaCallback
from training.models import hub_id
from training.records import write_whole
from training.tasks import load_task
from training.variants import apply_variant

SCORES = ("accuracy", "f1", "loss", "perplexity", "rmse", "mae")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate")


def main(argv: list[str] | None = None) -> dict:
    data_args, variant_args, training_args = parse_args(argv)
    baseline = read_baseline(variant_args.baseline, data_args)

    # The seed comes before the model: its new head is drawn from it. Trainer sets it again before training.
    (enable_full_determinism if training_args.full_determinism else set_seed)(training_args.seed)
    with training_args.main_process_first(desc="load and tokenize"):
        task = load_task(data_args, training_args)
    splits = task.splits

    model = task.model.to(training_args.device)
    parameters_before = count_parameters(model)
    batches = []
    if variant_args.calibrate:
        rows = splits["train"].shuffle(seed=0)  # every rank fits on the same rows, and the random state stays as it is
        size = training_args.per_device_train_batch_size
        for start in range(0, min(variant_args.calibrate * size, len(rows)), size):
            batch = task.data_collator([rows[i] for i in range(start, min(start + size, len(rows)))])
            batches.append({name: tensor.to(training_args.device) for name, tensor in batch.items()})
    model, callbacks = apply_variant(model, variant_args, batches, seed=training_args.seed)
    with_ema = variant_args.ema_decay is not None
    checkpoint = find_checkpoint(
        training_args.resume_from_checkpoint, training_args.output_dir, training_args.world_size, with_ema
    )
    require_same_patch(checkpoint, model)
    callbacks += task.callbacks
    callbacks += [EmaCallback(variant_args.ema_decay, checkpoint)] if with_ema else []

    monitor = StationarityCallback(every=variant_args.monitor_every) if variant_args.monitor_every else None
    callbacks += [monitor] if monitor else []
    card = ModelCardCallback(
        base_model=hub_id(data_args.model_name_or_path),
        dataset=task.dataset | {"split": "test"},
        baseline=baseline and card_metrics(baseline["metrics"]),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"] if task.augmented is None else task.augmented,
        eval_dataset=splits["validation"],
        processing_class=task.processing_class,
        data_collator=task.data_collator,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
        compute_loss_func=task.compute_loss,
        callbacks=[*callbacks, card],
    )
    if with_ema and trainer.is_fsdp_enabled:
        raise ValueError("ema_decay averages whole weights; FSDP gives each process a part of them. Use DDP.")
    if "ACCELERATE_USE_FSDP" in os.environ and not trainer.is_fsdp_enabled:
        warnings.warn("FSDP was asked for, but accelerate has it for several GPUs only: each process has all weights.")
    start = time.perf_counter()
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    trainer.save_state()  # the curves, for `hf-autonorm report`

    metrics = {}
    for split in ("validation", "test"):
        measured = trainer.evaluate(splits[split], metric_key_prefix=split)
        trainer.log_metrics(split, measured)
        metrics[split] = {name.removeprefix(f"{split}_"): value for name, value in measured.items() if name != "epoch"}

    watcher = next((callback for callback in callbacks if isinstance(callback, GateFreezeCallback)), None)
    stationarity = asdict(monitor.report(watcher)) if monitor else None
    if monitor and variant_args.try_earlier_freezes:
        stationarity["frozen_at"] = {}
        for epoch in monitor.selectors:
            with monitor.gates_of(trainer.model, epoch):
                then = trainer.evaluate(splits["validation"], metric_key_prefix="then")
            stationarity["frozen_at"][epoch] = {
                name.removeprefix("then_"): value for name, value in then.items() if name != "epoch"
            }
    launch = ["accelerate", "launch", "--num_processes", str(training_args.world_size)]
    results = {
        "task": data_args.task,
        "variant": variant_args.variant,
        "seed": training_args.seed,
        "metrics": metrics,
        "train_loss": trained.training_loss if checkpoint is None else None,  # Trainer's is of the steps since then
        "freeze_decision": watcher.decision if watcher else None,
        "gate_history": watcher.history if watcher else [],
        "stationarity": stationarity,
        "rows": {name: len(split) for name, split in splits.items()},
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "processes": training_args.world_size,
        "parameters": {"total": count_parameters(model), "added": count_parameters(model) - parameters_before},
        "settings": asdict(data_args) | asdict(variant_args),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "command": without_secrets(
            shlex.join([*launch, "training/train.py", *(sys.argv[1:] if argv is None else argv)])
        ),
    }
    if trainer.is_world_process_zero():
        write_whole(Path(training_args.output_dir, "results.json"), json.dumps(results, indent=2) + "\n")
    # Weights that FSDP has cut up are put together again, by all processes.
    whole = {"state_dict": trainer.accelerator.get_state_dict(trainer.model)} if trainer.is_fsdp_enabled else {}
    save_pretrained(
        trainer.model,
        training_args.output_dir,
        metrics=card_metrics(metrics),
        command=results["command"],
        callbacks=[*callbacks, card],
        tokenizer=task.processing_class,
        is_main_process=trainer.is_world_process_zero(),
        **whole,
    )
    if trainer.is_world_process_zero() and not training_args.disable_tqdm:  # somebody is looking
        folder = shlex.quote(training_args.output_dir)
        print(f"Written: {folder}. All of it on one page: hf-autonorm report {folder}")
    return results


def count_parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def card_metrics(metrics: dict[str, dict]) -> dict[str, float]:
    """What was scored on the test split, without how long it took."""
    return {name: value for name, value in metrics["test"].items() if name.startswith(SCORES)}


if __name__ == "__main__":
    main()
