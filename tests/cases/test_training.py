"""Under the stock Trainer: clocks, compiled and best models, optimizers, stability (README.md, rows 37 to 92)."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_autonorm import (
    GateConfig,
    GateFreezeCallback,
    StrengthRampCallback,
    from_pretrained,
    patch,
    save_pretrained,
    set_strength,
    unpatch,
)
from hf_autonorm.nn import AutoNorm
from tests.models import build, gpt2, loss_of, run
from tests.test_callbacks import Rows, Stream, make, trainer


def autonorms(model):
    return [m for m in model.modules() if isinstance(m, AutoNorm)]


# --- row 37 ----------------------------------------------------------------------------------------------------------


def test_the_best_model_comes_back_without_a_warning_and_still_tied(tmp_path, caplog):
    torch.manual_seed(0)
    model = patch(gpt2(n_layer=1), gate=GateConfig(init_norm_weight=0.6))
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=2)
    one = trainer(tmp_path, [], model, Rows(causal=True), load_best_model_at_end=True, **settings)
    one.eval_dataset = Rows(4, causal=True)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("WARNING"):
        one.train()
    said = " ".join([str(w.message) for w in caught] + [r.getMessage() for r in caplog.records])
    # Of lm_head.weight, which is not in the file because it is tied, Trainer speaks with any GPT-2.
    assert not any(word in said for word in ("bias_gate", "bias_branches", "original", "strength", "unexpected"))
    assert one.model.lm_head.weight is one.model.transformer.wte.weight
    assert one.evaluate()["eval_loss"] == pytest.approx(one.state.best_metric, rel=1e-6)


# --- row 60 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "vit"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gates_learn_in_a_frozen_checkpointed_model(family, reentrant):
    model, inputs = build(family)
    model.requires_grad_(False)
    patch(model).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    loss_of(run(model, inputs)[:1]).backward()
    assert all(p.grad is not None for layer in autonorms(model) for p in layer.new_parameters())


# --- row 62 ----------------------------------------------------------------------------------------------------------


def test_evaluations_between_steps_move_no_clock(tmp_path):
    """The same step of the decision, ramp and count of forwards with an evaluation after each step as without."""
    ends = []
    for strategy in ("no", "steps"):
        freeze, ramp = GateFreezeCallback(freeze_step=2, rule="always"), StrengthRampCallback(ratio=1.0)
        run = trainer(
            tmp_path / strategy,
            [freeze, ramp],
            make(strength=0.0),
            Stream(),
            max_steps=4,
            gradient_accumulation_steps=2,
            eval_strategy=strategy,
            eval_steps=1,
        )
        run.train()
        assert freeze.decision["step"] == 2
        kept = [layer.statistics.clone() for layer in autonorms(run.model)]
        run.evaluate()
        assert all(torch.equal(s, layer.statistics) for s, layer in zip(kept, autonorms(run.model)))
        ramp = [entry["strength"] for entry in run.state.log_history if "strength" in entry]
        ends.append((ramp, freeze.count, [(h["step"], h["strength"]) for h in freeze.history]))
    assert ends[0] == ends[1] and ends[0][0] == pytest.approx([0.25, 0.5, 0.75, 1.0])


# --- row 69 ----------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Small, since each of its phases is compiled."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 2), torch.nn.LayerNorm(2))

    def forward(self, input_ids, labels):
        logits = self.layers(input_ids.float())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_callbacks_find_the_gates_of_a_compiled_model(tmp_path):
    callback, model = GateFreezeCallback(freeze_step=1, rule="always"), patch(Net())
    run = trainer(tmp_path, [callback], model, torch_compile=True, torch_compile_backend="eager", max_steps=2)
    run.train()
    assert callback.decision["frozen"] == ["layers.0", "layers.2"]
    save_pretrained(torch.compile(model, backend="eager"), tmp_path / "saved", card=False)
    again = from_pretrained(tmp_path / "saved", model=Net())
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    assert all(layer.scalar("frozen") == 1 for layer in autonorms(again))


# --- row 74 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [GateFreezeCallback, StrengthRampCallback])
def test_an_optimizer_older_than_the_patch_is_noticed(tmp_path, callback):
    """It does not hold the new parameters: they would never learn."""
    plain = unpatch(make())
    one = trainer(tmp_path, [callback()], plain, max_steps=2)
    one.create_optimizer()
    patch(plain)
    with pytest.raises(ValueError, match="optimizer.*before.*patch"):
        one.train()


def test_gradient_norms_are_finite_with_frozen_gates(tmp_path):
    callback = GateFreezeCallback(freeze_step=1, rule="always")
    run = trainer(tmp_path, [callback], max_steps=4, max_grad_norm=0.1)
    run.create_optimizer()  # after the patch: the order that works
    run.train()
    norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert len(norms) == 4 and all(0 < norm < float("inf") for norm in norms)


# --- row 92 ----------------------------------------------------------------------------------------------------------


def copy_task(batch, generator):
    """The second half of each row repeats the first."""
    half = torch.randint(3, 16, (batch, 4), generator=generator)
    return torch.cat([half, half], dim=1)


def from_scratch(seed, steps=60, **fields):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=16
    )
    model = patch(LlamaForCausalLM(config), **fields).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        ids = copy_task(8, generator)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    slopes = [b.slope().item() for layer in autonorms(model) for b in layer.bias_branches if b.pointwise]
    return losses, slopes


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_setting_learns_from_scratch(seed):
    settings = {
        "norm": dict(gate=GateConfig(kind="fixed", value=1.0)),
        "dyt": dict(norm="dyt"),
        "learned": dict(gate=GateConfig(init_norm_weight=0.5)),
    }
    ends = {}
    for name, fields in settings.items():
        losses, slopes = from_scratch(seed, **fields)
        assert all(loss == loss and loss < float("inf") for loss in losses)
        assert all(0 < slope < 100 for slope in slopes)
        ends[name] = sum(losses[-5:]) / 5
        assert ends[name] < 0.95 * losses[0]
    assert ends["learned"] < max(ends["norm"], ends["dyt"]) + 0.05


# --- row 74 ---------------------------------------------------------------------------------


def test_a_trainer_sees_the_same_parameters_in_the_same_groups(tmp_path):
    """The optimizer of a patched model holds every new parameter, without decay."""
    one = trainer(tmp_path, [], make(), max_steps=1)
    one.create_optimizer()
    held = {id(p): group["weight_decay"] for group in one.optimizer.param_groups for p in group["params"]}
    new = [p for layer in autonorms(one.model) for p in layer.new_parameters()]
    assert new and all(held[id(p)] == 0 for p in new) and isinstance(one, Trainer)
    set_strength(one.model, 0.0)
    assert {id(p) for p in one.model.parameters()} == held.keys()
