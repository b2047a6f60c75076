"""A forward pass on a GPU waits for nothing: no value is read on the host, nothing moves between the devices.

Without a GPU: fake CUDA tensors run the code of a GPU and compute nothing. Their backward pass needs a GPU, so there
they are fake CPU tensors, which have no values to be read either. CUDA graphs ask for the same.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_autonorm import GateConfig, patch, set_strength
from hf_autonorm.nn import AutoNorm
from tests.models import build, floats

RULES = {
    "norms": ("bert", {}),
    "gate per layer": ("bert", {"gate": GateConfig(granularity="layer")}),
    "gate per sequence": ("bert", {"gate": GateConfig(granularity="sequence")}),
    "hard gate": ("bert", {"gate": GateConfig(kind="hard")}),
    "random gate": ("bert", {"gate": GateConfig(kind="random")}),
    "fixed gate": ("bert", {"gate": GateConfig(kind="fixed", value=0.4)}),
    "every branch": ("bert", {"branches": ["dyt", "derf", "dyisru", "rms_norm", "adanorm", "film"]}),
    "dyt": ("llama", {"norm": "dyt"}),
    "affine-like linears": ("llama", {"norm": None, "linear": "affine_like"}),
    "norm-like linears": ("bert", {"norm": None, "linear": "norm_like"}),
    "affine-like convolutions": ("timm_convnext", {"norm": None, "conv": "affine_like"}),
    "norm-like convolutions": ("timm_convnext", {"norm": None, "conv": "norm_like"}),
}
SHORT = {"bert": {"num_hidden_layers": 1}, "llama": {"num_hidden_layers": 1, "use_cache": False}, "timm_convnext": {}}
STATES = ("train", "eval", "frozen", "half strength", "strength 0")


class Traffic(TorchDispatchMode):
    """Notes every operation that reads a value or has tensors of two devices (a number of no axis may come along)."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        copies = "copy" in str(func)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and (t.dim() or copies)]
        if len({t.device.type for t in tensors}) > 1 or "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.found.append(str(func))
        self.seen += 1
        return out


def fake(model, device):
    """Every tensor replaced by a fake one on this device; call it in a FakeTensorMode."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, t in table.items():
                if t is not None:
                    new = torch.empty(t.shape, dtype=t.dtype, device=device)
                    table[name] = nn.Parameter(new) if isinstance(t, nn.Parameter) else new
        for name in getattr(module, "_scalars", ()):
            module._remember(name)  # else the layer would read the new tensors once, as it should
    return model


def prepared(rules, state):
    family, fields = RULES[rules]
    model, inputs = build(family, **SHORT[family])
    patch(model, **fields)
    inputs.pop("attention_mask", None)  # transformers looks into a mask on its own
    model.train(state in ("train", "frozen"))
    if "strength" in state:
        set_strength(model, {"half strength": 0.5, "strength 0": 0.0}[state])
    for layer in model.modules():
        if isinstance(layer, AutoNorm) and state == "frozen":
            layer.freeze()
    return model, inputs


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rules", sorted(RULES))
def test_the_forward_pass_on_a_gpu_waits_for_nothing(rules, state):
    model, inputs = prepared(rules, state)
    with FakeTensorMode(), Traffic() as traffic:
        fake(model, "cuda")
        inputs = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in inputs.items()}
        traffic.seen = 0
        assert all(t.device.type == "cuda" for t in floats(model(**inputs)))
    assert traffic.seen > 20 and not traffic.found


@pytest.mark.parametrize("state", ["train", "frozen", "half strength"])
@pytest.mark.parametrize("rules", sorted(RULES))
def test_the_backward_pass_reads_nothing(rules, state):
    model, inputs = prepared(rules, state)
    with FakeTensorMode(), Traffic() as traffic:
        fake(model, "cpu")
        inputs = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in inputs.items()}
        sum(t.sum() for t in floats(model(**inputs))).backward()
        assert any(p.grad is not None for p in model.parameters())
    assert traffic.seen > 20 and not traffic.found


def test_the_watch_sees_a_read_and_a_move():
    with FakeTensorMode(), Traffic() as traffic:
        x = torch.empty(3, device="cuda")
        x + torch.tensor([1.0, 2.0, 3.0], device="cpu").to("cuda")
    assert traffic.found
    with Traffic() as traffic:
        torch.ones(1).item()
    assert traffic.found
