"""Norm layers beside their peers, forward + backward and forward alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_autonorm import GateConfig
from hf_autonorm.nn import AutoNorm

from .peers import DyT, NaiveAutoNorm
from .timing import Section, forward, forward_backward, measure, with_fused

OURS = {  # name → how to make it
    "AutoNorm": lambda width: AutoNorm(nn.LayerNorm(width)),
    "AutoNorm, frozen": lambda width: frozen(AutoNorm(nn.LayerNorm(width))),
    "AutoNorm over RMSNorm": lambda width: AutoNorm(nn.RMSNorm(width, eps=1e-6)),
    "AutoNorm, dyt alone": lambda width: AutoNorm(nn.LayerNorm(width), gate=GateConfig(kind="fixed", value=0.0)),
}


def frozen(layer: AutoNorm) -> AutoNorm:
    layer.freeze()
    return layer


def compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, fullgraph=True, dynamic=False)


def peers(width: int) -> dict[str, tuple[nn.Module, str]]:
    """As `candidates`: what is measured beside our own, but for LayerNorm."""
    return {
        "RMSNorm": (nn.RMSNorm(width), "0"),
        "DyT": (DyT(width), "0"),
        "DyT, compiled": (compiled(DyT(width)), "0"),
        "naive AutoNorm": (NaiveAutoNorm(width), "0"),
        "naive AutoNorm, compiled": (compiled(NaiveAutoNorm(width)), "0"),
    }


def candidates(width: int) -> dict[str, tuple[nn.Module, str]]:
    """(layer in training mode, whether hf_autonorm's own compiled code is on) by name."""
    found = {
        "LayerNorm": (nn.LayerNorm(width), "0"),
        **peers(width),
        "AutoNorm, strength 0": (AutoNorm(nn.LayerNorm(width), strength=0.0), "0"),
    }
    for name, make in OURS.items():
        found[f"{name}, eager"] = (make(width), "0")
        found[f"{name}, fused"] = (make(width), "1")
    return found


def work(width: int, tokens: int, backward: bool, names: list[str] | None = None) -> dict[str, Callable[[], object]]:
    """The candidates (or those named) as pieces of work on the same input."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    return {
        name: with_fused(fused, forward_backward(layer, x, grad) if backward else forward(layer.eval(), x))
        for name, (layer, fused) in candidates(width).items()
        if names is None or name in names
    }


def run(seconds: float, width: int = 768, tokens: int = 4096) -> dict[str, Section]:
    size = f"{tokens} tokens × {width}, fp32"
    return {
        "norm layers, forward + backward": measure(
            f"norm layers, forward + backward, {size}", "LayerNorm", work(width, tokens, True), seconds
        ),
        "norm layers, forward": measure(
            f"norm layers, forward in eval, {size}", "LayerNorm", work(width, tokens, False), seconds / 3
        ),
    }
