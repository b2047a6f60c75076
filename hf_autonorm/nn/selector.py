"""AutoNorm's gate: how much of the original norm, how much of each branch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import GateConfig
from .branches import masked_mean, uniform_fan_in_
from .functional import one_hot, soft_weights

_TINY = torch.finfo(torch.float32).tiny


def gumbel_like(logits: Tensor) -> Tensor:
    """Standard Gumbel noise −log E with E ~ Exp(1), from the global random state; always finite."""
    return -torch.empty_like(logits).exponential_().clamp(min=_TINY).log()


class NormSelector(nn.Module):
    """Weights over [original, branch 1 … branch K] that sum to 1 (AutoNorm, arXiv 2607.10593).

    p = softmax(W₂ relu(W₁ x + b₁) + b₂), computed in fp32 or wider whatever the parameters' dtype. While training
    and not frozen, `gumbel` draws w = softmax((logits + Gumbel noise)/τ); otherwise w = p. W₂ starts at zero and b₂
    so that the original's weight is `init_norm_weight`: to 1e-6 in fp32, to 1e-5 in bf16 and fp16, also where the
    layer is cast later.

    The parameters are held plainly: an inner `nn.Linear` would be re-initialised, LoRA-wrapped, quantised or patched.

    Args:
        width: channels of the norm.
        branches: K.
        gate: kind, granularity, hidden width, τ, initial weight.
        device: of the parameters.
        dtype: likewise.
    """

    def __init__(
        self,
        width: int,
        branches: int,
        gate: GateConfig = GateConfig(),
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.choices, self.gate = width, branches + 1, gate
        if self.learns:
            new = lambda *shape: nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))  # noqa: E731
            if gate.granularity != "layer":
                hidden = gate.hidden_width(width)
                self.weight_in, self.bias_in = new(hidden, width), new(hidden)
                self.weight_out = new(self.choices, hidden)
            self.bias_out = new(self.choices)

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn, and so to freeze."""
        return self.gate.kind not in ("fixed", "random")

    def initial_weights(self) -> list[float]:
        """The weights p before training, the original first."""
        first = {"fixed": self.gate.value, "random": 1 / self.choices}.get(self.gate.kind, self.gate.init_norm_weight)
        return [first] + [(1 - first) / (self.choices - 1)] * (self.choices - 1)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if not self.learns:
            return
        if self.gate.granularity != "layer":
            uniform_fan_in_(self.weight_in, generator)
            self.bias_in.zero_()
            self.weight_out.zero_()
        if not self.bias_out.is_meta:
            first, rest = self.initial_weights()[:2]
            difference = math.log(first) - math.log(rest)
            # Only differences count. One log per weight would be rounded to 2 digits in half precision; so the first
            # logit is a number that every dtype holds, and the others are the small rest, held to 2 digits of that.
            coarse = torch.tensor(difference, dtype=torch.bfloat16, device="cpu").item()
            self.bias_out.fill_(coarse - difference)
            self.bias_out[0] = coarse

    def logits(self, rows: Tensor, mask: Tensor | None, frozen: Tensor | None) -> Tensor:
        """rows: (…, width) in fp32 or wider. Returns (…, K+1); the leading axes are 1 (or absent) where shared.

        frozen: a (1,) buffer; where it is 1 the parameters take part with a gradient of exactly zero, so that DDP,
        which was built when they learned, still sees them.
        """

        def own(parameter: Tensor) -> Tensor:
            if frozen is not None:
                parameter = torch.where(frozen > 0, parameter.detach(), parameter)
            return parameter.to(rows.dtype)

        if self.gate.granularity == "layer":
            return own(self.bias_out)
        if self.gate.granularity == "sequence":
            rows = masked_mean(rows, mask)
        hidden = torch.relu(F.linear(rows, own(self.weight_in), own(self.bias_in)))
        return F.linear(hidden, own(self.weight_out), own(self.bias_out))

    def forward(
        self, rows: Tensor, mask: Tensor | None = None, *, frozen: Tensor | None = None, noisy: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """(w, log p), each (…, K+1) in the dtype of `rows`.

        rows: the norm's input, channels last, fp32 or wider. mask: (batch, tokens), True where valid, read by
            `sequence`.
        noisy: whether to sample; None: while training.
        """
        noisy = self.training if noisy is None else noisy
        kind = self.gate.kind
        if not self.learns:
            first, rest = self.initial_weights()[:2]
            # Filled where they are: numbers from the host would be waited for, and refused while a graph is captured.
            weights = torch.cat([rows.new_full((1,), first), rows.new_full((self.choices - 1,), rest)])
            log_p = weights.clamp(min=_TINY).log()
            if kind == "random" and noisy:
                # Exp(1) draws, normalised: uniform on the simplex (uniform on [0, 1] for one branch).
                draw = torch.empty(self._noise_shape(rows), dtype=rows.dtype, device=rows.device).exponential_()
                draw = draw.clamp(min=_TINY)
                weights = draw / draw.sum(-1, keepdim=True)
            return weights, log_p
        logits = self.logits(rows, mask, frozen)
        log_p = F.log_softmax(logits, dim=-1)
        noise = gumbel_like(logits) if kind in ("gumbel", "hard") and noisy else None
        weights = soft_weights(logits, noise, self.gate.tau)
        if kind == "hard":
            weights = one_hot(weights) + (weights - weights.detach())  # straight-through: the value is exactly one-hot
        return weights, log_p

    def _noise_shape(self, rows: Tensor) -> tuple[int, ...]:
        if self.gate.granularity == "layer":
            return (self.choices,)
        if self.gate.granularity == "sequence":
            return (rows.shape[0], *[1] * (rows.dim() - 2), self.choices)
        return (*rows.shape[:-1], self.choices)

    def extra_repr(self) -> str:
        return f"{self.width}, choices={self.choices}, kind={self.gate.kind}, granularity={self.gate.granularity}"
