"""ModelCardCallback: the card's numbers are those of the run, and of the model that is saved."""

import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_autonorm import GateFreezeCallback, ModelCardCallback, patch, save_pretrained
from hf_autonorm.hub.card_callback import evaluations, results, typed_command
from hf_autonorm.hub.facts import duration, evaluation_table, without_secrets
from tests.hub.small import tiny_bert

ROWS = [{"input_ids": torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(i)), "labels": i % 2}
        for i in range(24)]  # fmt: skip


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_for(model, folder, callbacks, **options) -> Trainer:
    options = {"num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 2} | options
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-3, seed=3, weight_decay=0.1, report_to=[],
        use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:10], compute_metrics=accuracy,
        callbacks=callbacks,
    )  # fmt: skip


def card_of(folder) -> tuple[str, dict, dict]:
    text = (folder / "README.md").read_text()
    found = ModelCard.load(folder / "README.md").data.eval_results or []
    return text, yaml.safe_load(text.split("---")[1]), {r.metric_name: r.metric_value for r in found}


def test_the_card_of_a_run(tmp_path):
    model = tiny_bert()
    given = {"base_model": "owner/base", "dataset": {"type": "owner/data", "split": "test"}, "license": "mit"}
    card = ModelCardCallback(**given, baseline={"accuracy": 0.25}, command="python train.py --variant autonorm_s")
    freeze = GateFreezeCallback(freeze_epoch=1)
    trainer = trainer_for(model, tmp_path / "out", [card, freeze])
    trainer.train()
    last = [e for e in trainer.state.log_history if "eval_accuracy" in e][-1]
    text, data, values = card_of(save_pretrained(model, tmp_path / "m", callbacks=[card, freeze]))
    assert values == {
        "accuracy (patched)": last["eval_accuracy"],
        "accuracy (baseline, not patched)": 0.25,
        "loss (patched)": last["eval_loss"],
    }
    assert (data["base_model"], data["datasets"], data["license"]) == ("owner/base", ["owner/data"], "mit")
    for words in (
        f"| accuracy | {last['eval_accuracy']:.6g} | 0.25 | {last['eval_accuracy'] - 0.25:+.4g} |",
        "| learning_rate | 0.001 |", "| train_batch_size | 4 |", "| seed | 3 |", "| weight_decay | 0.1 |",
        "| num_epochs | 3", "adamw", "python train.py --variant autonorm_s", "Trained on 24 examples in ", " on CPU (",
        "| epoch | step | train loss | loss | accuracy |", "5 of 5 gates frozen at epoch 1",
    ):  # fmt: skip
        assert words in text, words
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            assert re.search(
                rf"^\| {entry['epoch']:g} \| {entry['step']} \| .* {entry['eval_loss']:.6g} \|", text, re.M
            )
    assert "OptimizerNames" not in text

    # What is given to the save itself wins; an evaluation after training is newer than those during it.
    scored = trainer.evaluate(ROWS[10:], metric_key_prefix="test")
    text, data, values = card_of(save_pretrained(model, tmp_path / "m2", callbacks=[card], license="apache-2.0"))
    assert values["accuracy (patched)"] == scored["test_accuracy"] and data["license"] == "apache-2.0"
    _, _, values = card_of(save_pretrained(model, tmp_path / "m3", callbacks=[card], metrics={"f1": 1.0}, baseline={}))
    assert values == {"f1 (patched)": 1.0}


def test_results_are_those_of_the_best_model_where_it_is_loaded(tmp_path):
    card = ModelCardCallback()
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = trainer_for(tiny_bert(), tmp_path / "out", [card], **options)
    trainer.train()
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert trainer.state.best_global_step == max(losses, key=losses.get) < max(losses)
    assert card.facts.metrics["loss"] == max(losses.values()) == pytest.approx(trainer.evaluate()["eval_loss"])


def test_no_result_is_told_that_is_not_the_saved_models(tmp_path):
    class NotAtTheEnd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate &= state.global_step < state.max_steps

    card, options = ModelCardCallback(), {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 7}
    trainer = trainer_for(tiny_bert(), tmp_path / "out", [card, NotAtTheEnd()], **options)
    trainer.evaluate()  # before training
    trainer.train()
    assert card.facts.evaluations and card.facts.metrics == {}
    text, data, _ = card_of(save_pretrained(trainer.model, tmp_path / "m", callbacks=[card]))
    assert "model-index" not in data and "No result was given" in text


def test_a_resumed_run_says_so(tmp_path):
    trainer_for(tiny_bert(), tmp_path / "out", [ModelCardCallback()]).train()
    card = ModelCardCallback()
    trainer = trainer_for(tiny_bert(), tmp_path / "out", [card])
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    text, _, _ = card_of(save_pretrained(trainer.model, tmp_path / "m", callbacks=[card]))
    assert "(since step 6, where the run was resumed)" in text
    assert [row["step"] for row in card.facts.evaluations] == [6, 12, 18]  # the whole run's


@pytest.mark.parametrize("seed", range(12))
def test_every_optional_fact_may_be_missing(tmp_path, seed):
    """A subset of all facts: valid metadata, no trace of the missing ones."""
    from hf_autonorm.hub.metadata import check_metadata

    draw = random.Random(seed)
    facts = {
        "metrics": draw.choice([{"accuracy": 0.5}, {"loss": math.nan}, {}]),
        "baseline": draw.choice([{"accuracy": 0.25}, {"accuracy": math.inf}]),
        "base_model": "owner/base",
        "dataset": draw.choice(["owner/data", {"name": "Some words"}, {"type": "a/b", "config": "c", "split": "s"}]),
        "license": "mit",
        "command": "python train.py",
    }
    if seed:
        facts = {name: value for name, value in facts.items() if draw.random() < 0.5}
    else:
        facts = dict.fromkeys(facts)
    card = ModelCardCallback(**{n: facts[n] for n in ("base_model", "license") if n in facts})
    text, data, values = card_of(
        save_pretrained(tiny_bert(patched=draw.random() < 0.8), tmp_path / "name", callbacks=[card], **facts)
    )
    check_metadata(data)
    for word in ("None", "{{", "\n\n\n", "| |\n"):
        assert word not in text
    assert all(math.isfinite(value) for value in values.values())
    finite = [v for n in ("metrics", "baseline") for v in (facts.get(n) or {}).values() if math.isfinite(v)]
    assert sorted(values.values()) == sorted(finite)
    assert ("no finite number" in text) == any(
        not math.isfinite(v) for n in ("metrics", "baseline") for v in (facts.get(n) or {}).values()
    )
    assert not values or data["model-index"][0]["name"] == "name"


def test_base_model_must_be_an_id(tmp_path):
    from hf_autonorm.hub.metadata import CardError

    with pytest.raises(CardError, match="base_model='/home/me/bert' must be a Hub id.*is saved in"):
        save_pretrained(tiny_bert(), tmp_path / "m", base_model="/home/me/bert")
    assert (tmp_path / "m" / "model.safetensors").exists()


def test_custom_code_is_told(tmp_path):
    text, _, _ = card_of(save_pretrained(tiny_bert(), tmp_path / "m", custom_code=True))
    assert 'AutoModelForSequenceClassification.from_pretrained("m", trust_remote_code=True)' in text
    text, _, _ = card_of(save_pretrained(tiny_bert(), tmp_path / "m"))
    assert "trust_remote_code" not in text


def test_results_and_evaluations():
    assert results({"eval_accuracy": 1, "eval_f1_macro": 0.5, "eval_runtime": 3.0, "epoch": 1}) == {
        "accuracy": 1, "f1_macro": 0.5,
    }  # fmt: skip
    assert results({"accuracy": 1.0, "runtime": 2.0}) == {"accuracy": 1.0} and results({}) == {}
    log = [{"loss": 2.0, "step": 1}, {"eval_a_loss": 1.0, "step": 2}, {"eval_b_loss": 3.0, "step": 2}]
    assert evaluations(log) == [{"epoch": None, "step": 2, "train_loss": 2.0, "a_loss": 1.0, "b_loss": 3.0}]
    long = [{"step": i, "loss": i / 7} for i in range(1, 100)]
    table = evaluation_table(long)
    assert len(table) <= 21 and table[0] == ["step", "loss"] and table[-1][0] == "99" and evaluation_table([]) == []
    assert [duration(s) for s in (None, math.nan, 3.14159, 125, 7380)] == [
        None, None, "3.14 s", "2 min 05 s", "2 h 03 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "typed, shown",
    [
        ("a --hub_token hf_x --seed 1", "a --hub_token … --seed 1"),
        ("a --hub-token='x y' --seed 1", "a --hub-token=… --seed 1"),
        ("HF=hf_abcdefghijklmnopqrst a --max_new_tokens 3 --api-key k", "HF=… a --max_new_tokens 3 --api-key …"),
        ("accelerate launch train.py --variant dyt", "accelerate launch train.py --variant dyt"),
        (None, None),
    ],
)
def test_no_secret_gets_into_a_card(typed, shown):
    assert without_secrets(typed) == shown


def test_the_typed_command(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "beside").mkdir()
    (tmp_path / "below" / "run.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from hf_autonorm.hub.card_callback import typed_command\n"
        "print(typed_command()); os.chdir('beside'); print(typed_command())"
    )
    command = [sys.executable, str(tmp_path / "below" / "run.py"), "--a", "b c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["python below/run.py --a 'b c'", "None"], done.stderr
    assert typed_command() is None or "pytest" in sys.argv[0]


def test_patch_of_a_part_is_in_the_table(tmp_path):
    model = patch(tiny_bert(patched=False), include=r".*layer\.1\..*")
    text, _, _ = card_of(save_pretrained(model, tmp_path / "m"))
    assert "| `bert.encoder.layer.*.output.LayerNorm` | 1 | LayerNorm |" in text


def test_several_evaluation_sets_are_all_told_and_no_timing_is_a_result(tmp_path):
    model, card = tiny_bert(), ModelCardCallback()
    trainer = trainer_for(model, tmp_path / "out", [card], num_train_epochs=1)
    trainer.eval_dataset = {"a": ROWS[:10], "b": ROWS[10:20]}
    trainer.train()
    trainer.evaluate()
    _, _, values = card_of(save_pretrained(model, tmp_path / "m", callbacks=[card]))
    assert values.keys() == {f"{part}_{name} (patched)" for part in "ab" for name in ("accuracy", "loss")}
