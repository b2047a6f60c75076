"""The layers that ours are measured against, each as its paper writes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DyT(nn.Module):
    """Dynamic Tanh, γ ⊙ tanh(αx) + β (arXiv 2503.10622, algorithm 1)."""

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class NaiveAutoNorm(nn.Module):
    """AutoNorm as its formula reads (arXiv 2607.10593), token gate, a selector as wide as ours: in training
    w = softmax((logits + Gumbel noise)/τ), y = w₀·LayerNorm(x) + w₁·DyT(x)."""

    def __init__(self, width: int, hidden: int = 16, tau: float = 0.5) -> None:
        super().__init__()
        self.norm, self.dyt, self.tau = nn.LayerNorm(width), DyT(width), tau
        self.selector = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.selector(x)
        weights = F.gumbel_softmax(logits, self.tau) if self.training else F.softmax(logits, dim=-1)
        return weights[..., :1] * self.norm(x) + weights[..., 1:] * self.dyt(x)


def liger() -> dict[str, type[nn.Module]]:
    """Liger's kernels, where the package and a GPU are."""
    if not torch.cuda.is_available():
        return {}
    try:
        from liger_kernel.transformers import LigerDyT, LigerLayerNorm
    except ImportError:
        return {}
    return {"Liger LayerNorm": LigerLayerNorm, "Liger DyT": LigerDyT}
