"""`gates`: what the table and the picture say of layers with and without a gate that learns."""

import math

import pytest
import torch

from hf_autonorm import GateConfig, gates, patch
from hf_autonorm.diagnostics.plots import _short
from tests.models import bert

IDS = torch.randint(3, 60, (2, 7))


@pytest.mark.parametrize(
    ("rules", "learns"),
    [
        ({}, True),
        ({"branches": ["dyt", "rms_norm"]}, True),
        ({"gate": GateConfig(kind="fixed", value=0.25)}, False),
        ({"norm": "dyt"}, False),
    ],
)
def test_every_row_is_a_distribution_and_tells_whether_it_learns(rules, learns):
    rows = gates(patch(bert(), **rules), [{"input_ids": IDS}] if learns else None)
    assert len(rows) > 1
    for row in rows:
        weights = torch.tensor(list(row.weights.values()), dtype=torch.float64)
        assert weights.sum().item() == pytest.approx(1, abs=1e-6) and row.learns == learns
        assert row.entropy == pytest.approx(-torch.special.xlogy(weights, weights).sum().item(), abs=1e-5)
        assert math.copysign(1, row.entropy) == 1
    text = str(rows)
    assert (f"{len(rows)} gates" in text) == learns
    assert (f"{len(rows)} norms without a gate that learns" in text) != learns
    assert (" no " in text) == learns  # whether it is frozen


def test_labels_of_a_picture_keep_layers_apart():
    names = [f"model.decoder.layers.{i}.{n}.LayerNorm" for i in range(12) for n in ("attention.output", "output")]
    assert len(set(_short(names))) == len(names) and max(map(len, _short(names))) <= 34
    assert _short(["norm"]) == ["norm"] and _short(["a.norm", "a.norm2"]) == ["norm", "norm2"] and _short([]) == []
