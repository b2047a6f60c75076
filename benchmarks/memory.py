"""What a training step keeps between forward and backward pass: bytes of saved tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_autonorm import patch

from .models import UNPATCHED, vision_transformer
from .peers import NaiveAutoNorm
from .timing import with_fused


@dataclass(frozen=True)
class Saved:
    """Bytes of each variant's saved activations."""

    title: str
    reference: str
    bytes: dict[str, int]

    def ratio(self, name: str) -> float:
        return self.bytes[name] / self.bytes[self.reference]


def saved_bytes(step: Callable[[], Tensor], own: Iterable[Tensor]) -> int:
    """Bytes that autograd saves while `step` computes a loss: each storage once, those of `own` (parameters, buffers,
    inputs) left out, in full where only a part of one is saved."""
    known = {t.untyped_storage().data_ptr() for t in own}
    kept: dict[int, torch.UntypedStorage] = {}  # held, or an address could be given out again

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = step()
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def allocated_bytes(step: Callable[[], Tensor]) -> int:
    """Bytes allocated and not given back while `step` runs, by the profiler: all that stays, however it is kept."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = step()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def naive(model: nn.Module) -> nn.Module:
    """Every LayerNorm replaced by AutoNorm as its formula reads."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LayerNorm":
                setattr(module, name, NaiveAutoNorm(child.weight.numel()))
    return model


def variants(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        UNPATCHED: (model, "0"),
        "naive AutoNorm": (naive(copy.deepcopy(model)), "0"),
        "AutoNorm": (patch(copy.deepcopy(model)), "auto"),
        "AutoNorm, eager": (patch(copy.deepcopy(model)), "0"),
        "AutoNorm, fused": (patch(copy.deepcopy(model)), "1"),
        "Dynamic Tanh": (patch(copy.deepcopy(model), "dyt"), "auto"),
        "affine-like linears and convolution": (
            patch(copy.deepcopy(model), None, linear="affine_like", conv="affine_like"),
            "auto",
        ),
    }


def run(seconds: float, depth: int = 12, images: int = 32) -> dict[str, Saved]:
    """`seconds` is not read: one step each."""
    torch.manual_seed(0)
    x, labels = torch.randn(images, 3, 32, 32), torch.randint(0, 10, (images,))
    found = {}
    for name, (model, fused) in variants(vision_transformer(depth)).items():
        model.train()

        def step(model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(x), labels)

        step = with_fused(fused, step)
        step()  # compiles, where it does
        found[name] = saved_bytes(step, [*model.parameters(), *model.buffers(), x, labels])
    title = f"saved for the backward pass, ViT-Lite of {depth} layers, {images} images, fp32"
    return {"activation memory": Saved(title, UNPATCHED, found)}
