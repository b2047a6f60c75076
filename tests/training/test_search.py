"""`model_init`, hyperparameter search and trackers with a patched model."""

import pytest
import torch

pytest.importorskip("datasets")

from torch import nn
from transformers import Trainer, TrainingArguments

from hf_autonorm import GateFreezeCallback, StrengthRampCallback, patch
from hf_autonorm.nn import AutoNorm
from tests.training.small import Small


def make_model(trial=None) -> nn.Module:
    """As Trainer calls it, once for each trial; drawn from the seed that Trainer sets before."""
    return patch(Small(), strength=0.0)


def make_trainer(folder, **options) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": x, "labels": x.sum()} for x in torch.randn(16, 3, generator=generator)]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, learning_rate=0.05, use_cpu=True, disable_tqdm=True,
        logging_steps=1, eval_strategy="epoch", save_strategy="no", **options
    )  # fmt: skip
    callbacks = [GateFreezeCallback(freeze_epoch=1, rule="always"), StrengthRampCallback(ratio=0.5)]
    return Trainer(model_init=make_model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def test_training_twice_from_model_init_gives_the_same(tmp_path):
    """The second training starts from a fresh patch at strength 0, thawed, and the callbacks from their beginnings."""
    trainer = make_trainer(tmp_path)
    runs = []
    for _ in range(2):
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "gate_entropy" in entry]
        runs.append((trainer.model, trainer.model.state_dict(), [(e["loss"], e["strength"]) for e in history]))
        assert isinstance(trainer.model.norm, AutoNorm) and trainer.model.norm.scalar("frozen") == 1
        decision = next(c.decision for c in trainer.callback_handler.callbacks if isinstance(c, GateFreezeCallback))
        assert decision["step"] == 4
    (first, weights, log), (second, others, other_log) = runs
    assert first is not second and len(log) == 8 and log == other_log
    assert log[0][1] < 1 and log[-1][1] == 1  # the ramp
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_hyperparameter_search_patches_every_trial_anew(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer = make_trainer(tmp_path)
    models = []

    def objective(metrics):
        models.append(trainer.model)
        return metrics["eval_loss"]

    def space(trial):
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-8, 0.05, step=0.05 - 1e-8)}

    best = trainer.hyperparameter_search(
        space,
        objective,
        n_trials=2,
        direction="minimize",
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-8, 0.05]}),
    )
    assert len({id(model) for model in models}) == 2
    assert all(model.norm.scalar("frozen") == 1 and model.norm.scalar("strength") == 1 for model in models)
    assert best.hyperparameters["learning_rate"] == pytest.approx(0.05)  # the other one learns nothing


def test_tensorboard_gets_the_gates_beside_the_loss(root, tiny_bert, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("evaluate")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from training.train import main

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    command = f"""
        --config {root}/training/recipes/word_sentiment.yaml --model_name_or_path {tiny_bert} --use_cpu true
        --variant autonorm --strength_ramp_ratio 0.6 --max_steps 3 --logging_steps 1 --report_to tensorboard
        --max_train_samples 64 --max_eval_samples 8 --per_device_train_batch_size 4 --disable_tqdm true
        --eval_strategy no --save_strategy no --output_dir {tmp_path / "run"}
    """
    main(command.split())
    (folder,) = {file.parent for file in (tmp_path / "board").rglob("events.out.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = {"gate_entropy", "gate_norm_weight", "gates_frozen", "strength", "loss"}
    for name in logged:
        assert len(events.Scalars(f"train/{name}")) == 3, name
