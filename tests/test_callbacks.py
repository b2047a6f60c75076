"""Freezing and ramping under the stock Trainer."""

import copy
import json
import warnings

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from hf_autonorm import GateConfig, GateFreezeCallback, StationarityCallback, StrengthRampCallback, patch, set_strength
from hf_autonorm.errors import AutoNormError, ConfigError, NotPatchedError
from hf_autonorm.nn import AutoNorm
from hf_autonorm.patching.record import wrappers
from tests.models import bert, gpt2, perturb_norms, same_bits


class Rows(Dataset):
    """Token rows with a label that can be learned (the parity of the first token)."""

    def __init__(self, count=8, length=5, causal=False):
        generator = torch.Generator().manual_seed(0)
        self.ids, self.causal = torch.randint(3, 64, (count, length), generator=generator), causal

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids if self.causal else ids[0] % 2}


class Stream(IterableDataset):
    def __iter__(self):
        rows = Rows(64)
        yield from (rows[i] for i in range(len(rows)))


def make(seed=0, builder=bert, gate=None, **fields):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = perturb_norms(builder(num_hidden_layers=1) if builder is bert else builder(n_layer=1))
        return patch(model, gate=gate or GateConfig(init_norm_weight=0.6), **fields)


def trainer(folder, callbacks, model=None, data=None, **arguments):
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=0.01,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        dataloader_pin_memory=False,
    )
    built = (
        dict(model=model or make()) if "model_init" not in arguments else dict(model_init=arguments.pop("model_init"))
    )
    return Trainer(
        **built,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=data or Rows(),
        eval_dataset=Rows(4),
        callbacks=callbacks,
    )


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, AutoNorm)}


class Watch(tf.TrainerCallback):
    """Keeps the selectors' bits and flags after every optimizer step."""

    def __init__(self):
        self.selectors, self.flags, self.strengths = {}, {}, {}

    def on_step_end(self, args, state, control, model, **kwargs):
        self.selectors[state.global_step] = {
            f"{n}.{k}": p.detach().clone() for n, m in layers(model).items() for k, p in m.bias_gate.named_parameters()
        }
        self.flags[state.global_step] = [m.scalar("frozen") for m in layers(model).values()]
        self.strengths[state.global_step] = {m.scalar("strength") for m in layers(model).values()}


def entropy_of(model):
    return sum(m.statistics[-1].item() for m in layers(model).values()) / len(layers(model))


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, threshold, freezes",
    [
        ("paper", 0.0, True),
        ("paper", 10.0, False),
        ("converged", 10.0, True),
        ("converged", 0.0, False),
        ("always", 10.0, True),
        ("always", 0.0, True),
        ("never", 0.0, False),
        ("never", 10.0, False),
    ],
)
def test_each_rule_decides_at_the_end_of_its_epoch(tmp_path, rule, threshold, freezes):
    callback, watch = GateFreezeCallback(2, threshold, rule), Watch()
    run = trainer(tmp_path, [callback, watch])
    run.train()
    assert watch.flags[4] == [0.0] * 3  # two steps an epoch: the decision falls after step 4
    assert watch.flags[5] == watch.flags[6] == [float(freezes)] * 3
    assert all(m.scalar("frozen") == freezes for m in layers(run.model).values())
    decision = callback.decision
    assert (
        (decision["frozen"] == list(layers(run.model))) == freezes
        and (decision["step"], decision["epoch"]) == (4, 2)
        or (rule == "converged" and not freezes)
    )
    assert [entry["step"] for entry in callback.history] == [2, 4, 6]
    assert callback.decision["rule"] == rule in callback.describe()
    selectors = watch.selectors
    constant = all(same_bits(v, selectors[6][k]) for k, v in selectors[4].items())
    assert constant == freezes
    assert not all(same_bits(v, selectors[4][k]) for k, v in selectors[3].items())
    assert any("gate_decision" in entry for entry in run.state.log_history)
    json.dumps(run.state.log_history), json.dumps(callback.state())


def test_scope_layer_freezes_each_layer_by_its_own_entropy(tmp_path):
    model = make(gate=GateConfig(init_norm_weight=0.6, granularity="layer"))
    sure, *unsure = layers(model).values()
    with torch.no_grad():
        sure.bias_gate.bias_out.copy_(torch.tensor([20.0, -20.0]))
    callback = GateFreezeCallback(1, 0.1, "paper", "layer")
    trainer(tmp_path, [callback], model, num_train_epochs=1).train()
    assert sure.scalar("frozen") == 0 and all(m.scalar("frozen") == 1 for m in unsure)
    assert callback.decision["frozen"] == list(layers(model))[1:] and callback.decision["layers"] == 3


def test_converged_freezes_later_layers_when_they_get_there(tmp_path):
    model = make(gate=GateConfig(init_norm_weight=0.6, granularity="layer"))
    callback = GateFreezeCallback(1, 0.1, "converged", "layer")

    class Nudge(tf.TrainerCallback):
        def on_epoch_end(self, args, state, control, model, **kwargs):
            if state.epoch == 1:  # one gate makes up its mind in epoch 2
                with torch.no_grad():
                    next(iter(layers(model).values())).bias_gate.bias_out.copy_(torch.tensor([20.0, -20.0]))

    run = trainer(tmp_path, [callback, Nudge()], model)
    run.train()
    assert [m.scalar("frozen") for m in layers(model).values()] == [1.0, 0.0, 0.0]
    assert callback.decision["epoch"] == 2 and callback.decision["frozen"] == list(layers(model))[:1]


def test_logs_hold_entropy_weight_and_share(tmp_path):
    callback = GateFreezeCallback(2, 0.0)
    run = trainer(tmp_path, [callback])
    run.train()
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(entries) == 6
    for entry in entries:
        assert 0 <= entry["gate_entropy"] <= 0.6932 and 0 <= entry["gate_norm_weight"] <= 1
        assert entry["gate_entropy_normalized"] == pytest.approx(entry["gate_entropy"] / 0.693147, abs=1e-4)
    assert [entry["gates_frozen"] for entry in entries] == [0, 0, 0, 0, 1, 1]
    mean = sum(entry["gate_entropy"] for entry in entries[:2]) / 2
    first = callback.history[0]["layers"]
    assert sum(layer["entropy"] for layer in first.values()) / 3 == pytest.approx(mean, abs=1e-4)
    assert all(sum(layer["weights"]) == pytest.approx(1, abs=1e-5) for layer in first.values())


# --- the clock -------------------------------------------------------------------------------------------------------


def test_trackers_see_what_is_logged_beside_the_loss_and_every_callback_is_called_once(tmp_path):
    """Trainer's own trackers come before the callbacks it is given, as `first` does here."""

    class Tracker(tf.TrainerCallback):
        def __init__(self):
            self.begun, self.seen = 0, []

        def on_train_begin(self, args, state, control, **kwargs):
            self.begun += 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(dict(logs))

    first, last = Tracker(), Tracker()
    own = [GateFreezeCallback(1), StrengthRampCallback(), StationarityCallback(every=1)]
    run = trainer(tmp_path, [first, *own, last], model=set_strength(make(), 0.0))
    run.train()
    order = run.callback_handler.callbacks
    assert order.index(first) < order.index(last) and [c for c in order if c in own] == own
    for tracker in (first, last):
        assert tracker.begun == 1 and len(tracker.seen) == 7  # six steps and the summary
        assert all({"gate_entropy", "gates_frozen", "strength"} <= logs.keys() for logs in tracker.seen[:6])
        assert any("norm_input_drift" in logs for logs in tracker.seen)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("freeze", [{"freeze_epoch": 1}, {"freeze_epoch": 2}, {"freeze_step": 3}])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_run_too_short_for_a_decision_is_told_so_at_its_start(tmp_path, steps, freeze, accumulate):
    callback = GateFreezeCallback(**freeze, rule="always")
    run = trainer(tmp_path, [callback], max_steps=steps, gradient_accumulation_steps=accumulate)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.train()
    assert (callback.decision is None) == any("no decision will fall" in str(w.message) for w in said)


def test_freeze_step_counts_optimizer_steps_not_micro_batches(tmp_path):
    callback, watch = GateFreezeCallback(freeze_step=2, rule="always"), Watch()
    calls = []
    model = make()
    next(iter(layers(model).values())).original.register_forward_hook(lambda *_: calls.append(1))
    run = trainer(
        tmp_path,
        [callback, watch],
        model,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
    )
    run.train()
    assert [watch.flags[step][0] for step in (1, 2, 3, 4)] in ([0, 0, 1, 1], [0, 1, 1, 1])
    assert callback.decision["step"] == 2
    assert all(same_bits(v, watch.selectors[4][k]) for k, v in watch.selectors[2].items())


def test_the_entropy_of_all_micro_batches_counts(tmp_path):
    """Two micro-batches an optimizer step: the mean is over both, and evaluations do not enter."""
    seen = []

    class Keep(tf.TrainerCallback):
        def keep(self, args, state, control, model, **kwargs):
            seen.append(entropy_of(model))

        on_substep_end = on_step_end = keep

    callback = GateFreezeCallback(freeze_step=2, rule="always")
    trainer(
        tmp_path,
        [Keep(), callback],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    ).train()
    assert len(seen) == 4 and callback.decision["entropy"] == pytest.approx(sum(seen) / 4, rel=1e-5)


def test_data_without_a_length_has_no_epochs(tmp_path):
    with pytest.raises(ConfigError, match="use freeze_step"):
        trainer(tmp_path, [GateFreezeCallback(1)], data=Stream(), max_steps=3).train()
    callback = GateFreezeCallback(freeze_step=2, rule="always")
    run = trainer(tmp_path, [callback], data=Stream(), max_steps=3)
    run.train()
    assert callback.decision["step"] == 2 and all(m.scalar("frozen") for m in layers(run.model).values())
    trainer(tmp_path, [GateFreezeCallback(rule="never")], data=Stream(), max_steps=2).train()


# --- frozen is frozen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_a_frozen_selector_is_bit_constant(tmp_path, optim):
    arguments = dict(optim=optim, max_grad_norm=1.0)
    if optim == "sgd":
        arguments["optim_args"] = "momentum=0.9"
    if optim == "adafactor":
        arguments["lr_scheduler_type"] = "constant"
    watch = Watch()
    run = trainer(tmp_path, [GateFreezeCallback(1, rule="always"), watch], **arguments)
    decayed = run.model.state_dict()
    decayed = {k: v.clone() for k, v in decayed.items()}
    run.train()
    for step in range(3, 7):
        assert all(same_bits(v, watch.selectors[step][k]) for k, v in watch.selectors[2].items())
    assert not all(same_bits(v, watch.selectors[1][k]) for k, v in watch.selectors[2].items())
    assert all(p.requires_grad for p in run.model.parameters())
    moved = [k for k, v in run.model.state_dict().items() if not torch.equal(v, decayed[k])]
    assert any(".original." in k for k in moved) and any("bias_branches" in k for k in moved)
    norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert norms and all(torch.tensor(norms).isfinite())


# --- resume ----------------------------------------------------------------------------------------------------------


def freeze_and_ramp():
    return [GateFreezeCallback(1, 0.0), StrengthRampCallback(ratio=0.8)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(an unbroken run of 6 steps, two an epoch, the freeze at the end of epoch 1; its folder; its callback)"""
    folder, callbacks = tmp_path_factory.mktemp("whole"), freeze_and_ramp()
    run = trainer(folder, callbacks, make(strength=0.0), save_strategy="steps", save_steps=1)
    run.train()
    return run, folder, callbacks[0]


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, whole, at):
    """Resumed inside the epoch before the freeze, exactly at it, inside and after later epochs."""
    run, folder, callback = whole
    callbacks = freeze_and_ramp()
    resumed = trainer(tmp_path, callbacks, make(seed=9, strength=0.5), save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
    theirs = run.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert same_bits(value, theirs[name]), name
    assert callbacks[0].decision == callback.decision and callbacks[0].history == callback.history
    assert callback.decision["step"] == 2 and all(m.scalar("frozen") for m in layers(resumed.model).values())
    losses = [
        [e["loss"] for e in r.state.log_history if e.get("step", 0) > at and "loss" in e] for r in (run, resumed)
    ]
    assert losses[0] == losses[1] and losses[0]


def test_a_second_training_starts_anew(tmp_path):
    callback = GateFreezeCallback(1, rule="never")
    run = trainer(tmp_path, [callback], num_train_epochs=1)
    run.train(), run.train()
    assert [entry["step"] for entry in callback.history] == [2]


def test_the_best_model_and_what_the_callback_says_agree(tmp_path):
    callback = GateFreezeCallback(freeze_step=3, rule="always")

    def first_is_best(prediction):
        first_is_best.calls += 1
        return {"score": float(first_is_best.calls)}

    first_is_best.calls = 0
    run = trainer(
        tmp_path,
        [callback],
        max_steps=5,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
    )
    run.compute_metrics = first_is_best
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    assert all(m.scalar("frozen") == 0 and m.frozen.item() == 0 for m in layers(run.model).values())
    x = torch.randn(2, 3, 32)
    layer = next(iter(layers(run.model.train()).values()))
    assert not torch.equal(layer(x), layer(x))  # it samples again: phase and tensors agree
    assert callback.decision["frozen"] == [] and len(callback.decision["decided"]) == 3
    assert callback.decision["best"].endswith("checkpoint-1") and "from before it: 0 frozen" in callback.describe()


def test_a_best_model_after_the_freeze_stays_frozen(tmp_path):
    callback = GateFreezeCallback(freeze_step=1, rule="always")
    run = trainer(
        tmp_path,
        [callback],
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    run.train()
    best = int(run.state.best_model_checkpoint.rsplit("-", 1)[1])
    frozen = [m.scalar("frozen") for m in layers(run.model).values()]
    assert (len(callback.decision["frozen"]) == 3) == (set(frozen) == {1.0}) and best >= 1


# --- wrong models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [GateFreezeCallback, StrengthRampCallback])
def test_a_patch_that_trainer_throws_away_is_noticed(tmp_path, callback):
    plain = lambda: bert(num_hidden_layers=1)  # noqa: E731
    run = trainer(tmp_path, [callback()], model_init=plain, max_steps=1)
    patch(run.model)  # train() builds a new model
    with pytest.raises(NotPatchedError, match="model_init=lambda: patch"):
        run.train()
    run = trainer(tmp_path, [callback()], model_init=lambda: make(), max_steps=1)
    run.train(), run.train()  # two trials
    assert len(layers(run.model)) == 3


@pytest.mark.parametrize("gate", [GateConfig(kind="random"), GateConfig(kind="fixed", value=0.5)])
def test_gates_that_do_not_learn_cannot_be_frozen(tmp_path, gate):
    with pytest.raises(NotPatchedError, match="nothing to freeze"):
        trainer(tmp_path, [GateFreezeCallback()], make(gate=gate)).train()


@pytest.mark.parametrize("fields", [{"norm": "dyt"}, {"norm": None, "linear": "affine_like"}])
def test_without_a_gate_there_is_nothing_to_freeze(tmp_path, fields):
    with pytest.raises(NotPatchedError, match="there is no gate to freeze.*Leave GateFreezeCallback out"):
        trainer(tmp_path, [GateFreezeCallback()], make(**fields)).train()


@pytest.mark.parametrize("callback", [GateFreezeCallback(1), StrengthRampCallback()])
def test_a_patch_that_cannot_learn_is_noticed(tmp_path, callback):
    """LoRA on top freezes all it does not adapt; with the norms in `modules_to_save` the gates go on learning."""
    lora = lambda **k: get_peft_model(make(strength=0.5), LoraConfig(target_modules=["query"], **k))  # noqa: E731
    name = type(callback).__name__
    with pytest.warns(UserWarning, match=f"{name}: no .* is trainable.*modules_to_save"):
        trainer(tmp_path, [callback], lora(), max_steps=1).train()
    with warnings.catch_warnings(record=True) as caught:
        trainer(tmp_path, [callback], lora(modules_to_save=["LayerNorm"]), max_steps=2).train()
    assert not any(name in str(w.message) for w in caught)
    if (
        name == "GateFreezeCallback"
    ):  # the copies that learn are counted, not the originals that PEFT keeps beside them
        assert callback.decision["layers"] == 3 and all("modules_to_save" in n for n in callback.decision["frozen"])
        assert all(layer["entropy"] > 0 for layer in callback.history[0]["layers"].values())


def test_a_patch_without_parameters_may_ramp_beside_lora(tmp_path):
    model = make(norm=None, linear="affine_like", include=r".*intermediate\.dense", strength=0.0)
    model = get_peft_model(model, LoraConfig(target_modules=["query"]))
    with warnings.catch_warnings(record=True) as caught:
        trainer(tmp_path, [StrengthRampCallback()], model, max_steps=1).train()
    assert not any("StrengthRampCallback" in str(w.message) for w in caught)


def test_strength_zero_counts_no_entropy_of_forwards_that_did_not_run(tmp_path):
    callback = GateFreezeCallback(1, rule="never")
    trainer(tmp_path, [callback], make(strength=0.0), num_train_epochs=1).train()
    for layer in callback.history[0]["layers"].values():  # the initial values: no gate has run
        assert layer["weights"] == pytest.approx([0.6, 0.4], abs=1e-5)


def test_layers_with_different_numbers_of_branches(tmp_path):
    model = make(include=["embeddings.LayerNorm"], branches=["dyt", "rms_norm", "derf"])
    patch(model, gate=GateConfig(kind="softmax"))
    callback = GateFreezeCallback(1, 0.0)
    trainer(tmp_path, [callback], model, num_train_epochs=1).train()
    lengths = [len(layer["weights"]) for layer in callback.history[0]["layers"].values()]
    assert lengths == [4, 2, 2]
    for layer in callback.history[0]["layers"].values():
        assert sum(layer["weights"]) == pytest.approx(1, abs=1e-5) and layer["entropy"] > 0


@pytest.mark.parametrize(
    "call",
    [
        dict(freeze_epoch=0),
        dict(freeze_epoch=1.5),
        dict(freeze_step=-1),
        dict(freeze_epoch=1, freeze_step=1),
        dict(rule="papre"),
        dict(scope="all"),
        dict(entropy_threshold=-1),
        dict(entropy_threshold=float("nan")),
        dict(freeze_epoch=True),
    ],
    ids=str,
)
def test_bad_settings_of_the_freeze(call):
    with pytest.raises(ConfigError, match=next(iter(call))):
        GateFreezeCallback(**call)


@pytest.mark.parametrize(
    "call", [dict(end=1.5), dict(end=-0.1), dict(ratio=0), dict(ratio=2), dict(end=True)], ids=str
)
def test_bad_settings_of_the_ramp(call):
    with pytest.raises(ConfigError, match=next(iter(call))):
        StrengthRampCallback(**call)


# --- the ramp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, end, ratio", [(0.0, 1.0, 0.6), (0.25, 1.0, 1.0), (1.0, 0.0, 0.5), (0.5, 0.5, 0.5)])
def test_the_ramp_is_a_straight_line_that_ends_at_its_end(tmp_path, start, end, ratio):
    watch = Watch()
    run = trainer(tmp_path, [StrengthRampCallback(end, ratio), watch], make(strength=start), max_steps=10)
    run.train()
    for step, strengths in watch.strengths.items():
        # `watch` runs after the ramp, so it sees the strength of the next step
        expected = start + (end - start) * min(1, step / (10 * ratio))
        assert list(strengths) == [pytest.approx(expected, abs=1e-6)]
    assert all(m.scalar("strength") == end and m.strength.item() == end for m in layers(run.model).values())
    logged = [entry["strength"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx([start + (end - start) * min(1, step / (10 * ratio)) for step in range(1, 11)])


def test_the_first_step_of_a_ramp_is_the_original(tmp_path):
    model = make(strength=0.0)
    plain = copy.deepcopy(model)
    set_strength(plain, 0.0)
    run = trainer(tmp_path, [StrengthRampCallback()], model, max_steps=2)
    run.train()
    reference = trainer(tmp_path, [], plain, max_steps=2)
    reference.train()
    first = [next(e["loss"] for e in r.state.log_history if "loss" in e) for r in (run, reference)]
    assert first[0] == first[1]


def test_a_causal_model_trains(tmp_path):
    model = make(builder=gpt2)
    run = trainer(tmp_path, [GateFreezeCallback(1, 0.0)], model, data=Rows(causal=True), num_train_epochs=2)
    run.train()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert issubclass(NotPatchedError, AutoNormError)


@pytest.mark.parametrize("first", ["norms", "linears"])
def test_a_ramp_moves_what_is_not_at_its_end_yet_and_no_other(tmp_path, first):
    """Patched twice, each with a strength of its own."""
    rules = {"norms": dict(strength=1.0), "linears": dict(norm=None, linear="affine_like", strength=0.0)}
    model = perturb_norms(bert(num_hidden_layers=1))
    for name in (first, *(rules.keys() - {first})):
        patch(model, **rules[name])
    seen = {}

    class Look(tf.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            seen[state.global_step] = [(isinstance(w, AutoNorm), w.scalar("strength")) for _, w in wrappers(model)]

    trainer(tmp_path, [StrengthRampCallback(ratio=1.0), Look()], model).train()
    for step, strengths in seen.items():
        assert {strength for norm, strength in strengths if norm} == {1.0}
        assert all(strength == pytest.approx(step / 6) for norm, strength in strengths if not norm)


@pytest.mark.parametrize("how", ["stopped", "best"])
def test_a_model_that_ends_below_the_ramp_is_told(tmp_path, how):
    class Stop(tf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, learning_rate=0.1,
                eval_strategy="epoch", save_strategy="epoch")  # fmt: skip
    model = set_strength(make(), 0.0)
    callbacks = [StrengthRampCallback(ratio=1.0), *([Stop()] if how == "stopped" else [])]
    told = r"at strength 0\.\d+, not at the ramp's end of 1: " + (
        ".* is from before" if how == "best" else "training ended"
    )
    with pytest.warns(UserWarning, match=told):
        trainer(tmp_path, callbacks, model, **(best if how == "best" else {})).train()


def test_frozen_before_is_frozen_still(tmp_path):
    """A second training, or two callbacks: nobody speaks of a best model that nobody asked for."""
    model, watcher = make(), GateFreezeCallback(1, rule="never")
    for _ in range(2):
        callback = GateFreezeCallback(1, rule="always")
        trainer(tmp_path, [watcher, callback], model).train()
        assert len(callback.decision["frozen"]) == callback.decision["layers"]
        assert "best model" not in callback.describe() + watcher.describe()


def test_a_checkpoint_of_other_settings_is_not_taken_over_in_silence(tmp_path):
    trainer(tmp_path, [GateFreezeCallback(1)], make(), save_strategy="epoch").train()
    run = trainer(tmp_path, [GateFreezeCallback(1, entropy_threshold=0.2)], make(), save_strategy="epoch")
    with pytest.warns(UserWarning, match="had other settings, .*0.1"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
