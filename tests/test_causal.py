"""A patched causal model stays causal, and its cache says the same as no cache."""

import pytest
import torch

from hf_autonorm import GateConfig, patch
from tests.models import CAUSAL, build, perturb_gates

GATES = {
    "token": {"gate": GateConfig()},
    "layer": {"gate": GateConfig(granularity="layer")},
    "hard": {"gate": GateConfig(kind="hard")},
    "random": {"gate": GateConfig(kind="random")},
    "many": {"branches": ["dyt", "derf", "dyisru", "rms_norm", "adanorm"]},
    "dyt": {"norm": "dyt"},
    "half": {"strength": 0.5},
}
every = pytest.mark.parametrize("gate", sorted(GATES))
family = pytest.mark.parametrize("family", CAUSAL)


def trained(family, gate):
    return perturb_gates(patch(build(family)[0], **GATES[gate]), size=1.0).eval()


@family
@every
@torch.no_grad()
def test_logits_of_a_prefix_do_not_change_when_tokens_are_appended(family, gate):
    model = trained(family, gate)
    ids = torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = model(ids).logits
    for length in (1, 2, 5, 11):
        torch.testing.assert_close(model(ids[:, :length]).logits, whole[:, :length], rtol=1e-4, atol=1e-5)
    other = ids.clone()
    other[:, 7:] = (ids[:, 7:] + 11) % 60 + 3
    changed = model(other).logits
    assert torch.equal(changed[:, :7], whole[:, :7]) and not torch.allclose(changed[:, 7:], whole[:, 7:])


@family
@pytest.mark.parametrize("gate", ["token", "layer", "hard", "half"])
@torch.no_grad()
def test_cached_generation_equals_uncached(family, gate):
    model = trained(family, gate)
    ids = torch.randint(3, 64, (2, 4), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    cached, uncached = (model.generate(ids, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences) and cached.sequences.shape == (2, 12)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-4, atol=1e-5)


@family
@torch.no_grad()
def test_left_padding_does_not_change_generation(family):
    model = trained(family, "token")
    ids = torch.randint(3, 64, (1, 4), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone, with_padding = model.generate(ids, **settings), model.generate(padded, attention_mask=mask, **settings)
    assert torch.equal(alone[:, 4:], with_padding[:, 7:])
