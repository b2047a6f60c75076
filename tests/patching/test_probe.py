"""`example_inputs`: what a run shows to be bypassed is left alone."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_autonorm import patch, plan


def read(tensor):
    """Stands for a compiled kernel: the source of the module does not show whose weight comes in."""
    return tensor


class Sneaky(nn.Module):
    """Uses one linear's weight behind its back and calls the other."""

    def __init__(self):
        super().__init__()
        self.bypassed, self.called, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        weights = {name: p for name, p in self.named_parameters()}
        return self.called(F.linear(x, read(weights["bypassed.weight"])))


def test_a_run_finds_what_the_source_hides():
    model, x = Sneaky(), torch.randn(2, 4)
    rules = dict(norm=None, linear="affine_like")
    assert len(plan(model, **rules).patched) == 3
    state = torch.get_rng_state()
    rows = plan(model, **rules, example_inputs=x)
    assert torch.equal(state, torch.get_rng_state())
    assert {row.name: row.reason is None for row in rows} == {"bypassed": False, "called": True, "idle": True}
    assert "bypassed" in next(row.reason for row in rows if row.reason)
    patch(model, **rules, example_inputs=x)
    assert type(model.bypassed) is nn.Linear and type(model.called) is not nn.Linear
    assert all(p.grad is None for p in model.parameters()) and "forward" not in vars(model.bypassed)
