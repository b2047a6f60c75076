"""The stationarity monitor under the stock Trainer: drift is what was put in, the advice follows from it."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_autonorm import GateFreezeCallback, patch
from hf_autonorm.diagnostics.stationarity import StationarityCallback
from hf_autonorm.errors import ConfigError, UnsupportedError
from tests.models import bert
from tests.test_callbacks import Rows, make, trainer


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("patched", [False, True])
def test_nothing_drifts_where_nothing_learns(tmp_path, patched):
    model = no_dropout(make() if patched else bert(num_hidden_layers=1))
    watch = StationarityCallback(every=1)
    run = trainer(tmp_path, [watch], model, learning_rate=0.0, weight_decay=0.0)
    if patched:  # gate noise is no drift of the first norm's input, but of the later ones'
        for layer in model.modules():
            if hasattr(layer, "freeze"):
                layer.freeze()
    run.train()
    assert [entry["epoch"] for entry in watch.drift] == [2, 3]
    assert all(entry["mean"] < 1e-5 for entry in watch.drift) and len(watch.drift[0]["layers"]) == 3
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_a_scaled_input_drifts_by_its_scale(tmp_path, factor):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.scale = 1.0

        def forward(self, input_ids, labels):
            x = torch.nn.functional.one_hot(input_ids % 6, 6).float() + 0.5
            return {"loss": self.norm(x * self.scale).square().mean()}

    class Grow(TrainerCallback):
        def on_epoch_end(self, args, state, control, model, **kwargs):
            model.scale *= factor

    model, watch = Scaled(), StationarityCallback(every=1)
    run = trainer(tmp_path, [watch, Grow()], model)
    run.train()
    for entry in watch.drift:  # μ and σ grow alike, so the distance is the growth
        assert entry["mean"] == pytest.approx(factor - 1, abs=1e-5)
    logged = [entry["norm_input_drift"] for entry in run.state.log_history if "norm_input_drift" in entry]
    assert logged[:1] == pytest.approx([factor - 1], abs=1e-5)


def test_advice_and_the_gates_of_an_earlier_epoch(tmp_path):
    watch, freeze = StationarityCallback(every=1), GateFreezeCallback(rule="never")
    model = make()
    start = copy.deepcopy(model.state_dict())
    run = trainer(tmp_path, [freeze, watch], model, learning_rate=0.05)
    run.train()
    report = watch.report(freeze)
    assert report.moved > 0 and report.distance[3.0] == 0 and len(report.distance) == 3
    assert "inputs" in report.advice and str(report.drift[0]["epoch"])[0] in str(report)
    batch = {"input_ids": Rows()[0]["input_ids"][None]}
    model.eval()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    now = model(**batch).logits
    with watch.gates_of(model, 1.0):
        then = model(**batch).logits
        gate = next(name for name in kept if "bias_gate.weight_out" in name)
        assert not torch.equal(model.state_dict()[gate], kept[gate])
        others = [name for name in kept if "bias_gate" not in name]
        assert all(torch.equal(model.state_dict()[name], kept[name]) for name in others)
    assert not torch.equal(now, then)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    with watch.gates_of(model, 3.0):
        assert torch.equal(model(**batch).logits, now)
    with pytest.raises(ConfigError, match="epoch 7"), watch.gates_of(model, 7.0):
        pass
    assert any(not torch.equal(start[name], kept[name]) for name in kept)


def test_gates_that_do_not_move_are_told(tmp_path):
    watch, freeze = StationarityCallback(every=1), GateFreezeCallback(rule="never")
    trainer(tmp_path, [freeze, watch], no_dropout(make()), learning_rate=0.0, weight_decay=0.0).train()
    report = watch.report(freeze)
    assert report.moved == pytest.approx(0, abs=0.05)
    assert "No gate was watched" in watch.report().advice


@pytest.mark.parametrize(
    "arguments", [{"every": 0}, {"every": True}, {"every": 1.5}, {"tolerance": -1}, {"tolerance": math.nan}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        StationarityCallback(**arguments)


def test_a_model_without_norms(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, input_ids, labels):
            return {"loss": self.layer(input_ids.float()).mean()}

    with pytest.raises(UnsupportedError, match="no norm"):
        trainer(tmp_path, [StationarityCallback()], Plain()).train()


def test_calibrated_patches_are_watched_too(tmp_path):
    model = patch(bert(num_hidden_layers=1), "dyt")
    watch = StationarityCallback(every=2)
    trainer(tmp_path, [watch], model).train()
    assert len(watch.drift) == 2 and watch.selectors[1.0] == {}
