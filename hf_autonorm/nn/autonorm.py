"""AutoNorm: a learned gate between a model's own norm and its alternatives (arXiv 2607.10593)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import GateConfig
from ..errors import ConfigError, nearest
from .branches import BRANCHES, Branch
from .closed_form import closed_form
from .lean import lean_forward
from .offload import execution_device
from .selector import NormSelector
from .traits import NormTraits, lay_out, measure
from .wrapper import Wrapper, with_zero_gradients, without_autocast

UNCALIBRATED = 2.0  # an R² that cannot occur: says "not calibrated" in a buffer that must stay finite


class MaskHolder:
    """The attention mask of the model's current forward, for gates and branches that pool a sequence.

    A forward pre-hook on the model fills it. It keeps the mask until the next forward: activation checkpointing
    recomputes a layer after the root's forward has returned.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def fill(self, attention_mask: Any) -> None:
        self.mask = valid_tokens(attention_mask)

    def __deepcopy__(self, memo: dict) -> MaskHolder:
        return memo.setdefault(id(self), MaskHolder())

    def __getstate__(self) -> dict:
        return {"mask": None}


def valid_tokens(mask: Any) -> Tensor | None:
    """(batch, tokens) bool from a 2-D mask of any dtype, or from an additive (0 / −inf) or boolean 4-D mask."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 4:  # (batch, heads or 1, queries or 1, keys): a key that some query sees is valid
        seen = mask if mask.dtype == torch.bool else mask > -1
        return seen.any(dim=(1, 2))
    return mask > 0


class AutoNorm(Wrapper):
    """(1 − λ(1 − w₀))·f(x) + λ·Σₖ wₖ·bₖ(x): f the wrapped norm, b the branches, w the gate, λ the strength.

    The mixture is computed in fp32 (or the input's wider type) and has the dtype, shape and memory layout of f(x).
    With a gate fixed on a branch (`GateConfig(kind="fixed", value=0.0)`) it is that branch alone; f then only runs
    for λ < 1.

    A NaN in a token gives NaN in that token, in training and eval, frozen or not, and changes no other token; so does
    an infinite value, as in the norm, but a branch alone shows what its own curve makes of it (tanh(∞) = 1). Where a
    gate or branch pools a sequence, its other valid tokens see the NaN too, padding and other sequences do not.

    Args:
        original: any LayerNorm- or RMSNorm-like module, whatever its class; `NotANorm` otherwise.
        branches: names from the registry (`register_branch`), in the gate's order.
        gate: the gate's settings.
        strength: λ.
        alpha: initial slope of pointwise branches.
        traits: the measured norm, where the caller has it already.
        generator: random numbers of the start; the global state is never used.
        fused: whether layers with one pointwise branch run compiled: "auto" (where it pays), "on" or "off"; the
            environment variable HF_AUTONORM_FUSED (auto, 1, 0) comes first.
        device: of the added parameters; default: that of the norm's own.
        dtype: likewise.

    Buffers beside those of `Wrapper`: `frozen` (1,), `r2` (K,) from calibration (2.0: none yet), `statistics`
    (K+2,): the gate's mean weights and its entropy in nats in the last training forward.
    """

    r2: Tensor

    def __init__(
        self,
        original: nn.Module,
        branches: Sequence[str] = ("dyt",),
        gate: GateConfig = GateConfig(),
        *,
        strength: float = 1.0,
        alpha: float = 0.5,
        traits: NormTraits | None = None,
        generator: torch.Generator | None = None,
        fused: str = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        traits = traits or measure(original)
        super().__init__(original, strength, device)
        self._add_scalar("frozen", 0.0, device)
        own = next((t for t in (*original.parameters(), *original.buffers()) if t.is_floating_point()), None)
        factory = {
            "device": device if device is not None else execution_device(original),
            "dtype": dtype if dtype is not None else (None if own is None else own.dtype),
        }
        self.width, self.channel_axis, self.layout = traits.width, traits.channel_axis, traits.layout
        self.branch_names, self.gate, self.fused = tuple(branches), gate, fused
        self._closed_form = closed_form(original, traits)
        # Names with `bias` in them: a stock Trainer exempts them from weight decay, and no load-time renaming of
        # transformers (whose patterns look for `norm`, `gate.`, …) matches them.
        self.bias_gate = NormSelector(traits.width, len(self.branch_names), gate, **factory)
        self.bias_branches = nn.ModuleList()
        for name in self.branch_names:
            if name not in BRANCHES:
                raise ConfigError(f"branch {name!r} is unknown; register it first ({nearest(name, BRANCHES)})")
            self.bias_branches.append(BRANCHES[name](original, traits, alpha=alpha, **factory))
        for p in (*self.bias_gate.parameters(), *self.bias_branches.parameters()):
            p._is_hf_initialized = True  # transformers' init_weights() leaves them alone
        scalars = {"device": self.strength.device, "dtype": torch.float32}
        self.register_buffer("r2", torch.full((len(self.branch_names),), UNCALIBRATED, **scalars))
        self.register_buffer("statistics", torch.zeros(len(self.branch_names) + 2, **scalars))
        self.mask_holder: MaskHolder | None = None
        self._recording = False
        self.train(original.training)
        self.reset_parameters(generator)
        self._sync_scalars()

    def _fp32_buffers(self) -> tuple[str, ...]:
        return (*self._scalars, *(name for name in ("r2", "statistics") if name in self._buffers))

    def _on_scalars(self) -> None:
        super()._on_scalars()
        self._is_frozen = self._values.get("frozen", 0.0) > 0

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Branches from the norm's scale and shift, the gate at `init_norm_weight`, nothing calibrated."""
        for part in (self.bias_gate, *self.bias_branches):
            part.reset_parameters(generator)
        if not self.r2.is_meta:
            self.r2.fill_(UNCALIBRATED)
            weights = torch.tensor(self.bias_gate.initial_weights(), dtype=torch.float32, device="cpu")
            entropy = -torch.special.xlogy(weights, weights).sum()
            self.statistics.copy_(torch.cat([weights, entropy[None]]))

    # --- gate state ------------------------------------------------------------------------------------------------

    @property
    def replaces(self) -> bool:
        """Whether the gate is fixed on the branches: the original plays no part at full strength."""
        return self.gate.kind == "fixed" and self.gate.value == 0

    @property
    def pools_sequence(self) -> bool:
        """Whether an output depends on other positions of the sequence."""
        pooling_gate = self.gate.granularity == "sequence" and self.bias_gate.learns
        return pooling_gate or any(branch.pools_sequence for branch in self.bias_branches)

    def freeze(self) -> None:
        """No more noise, and a gradient of zero for the selector (`requires_grad` stays: flipping it crashes DDP)."""
        self.set_scalar("frozen", 1.0)

    def unfreeze(self) -> None:
        self.set_scalar("frozen", 0.0)

    def become_branch(self, name: str, branch: Branch) -> None:
        """Drops the gate and all other branches: from now on `branch` alone, at full strength."""
        self.branch_names, self.gate = (name,), GateConfig(kind="fixed", value=0.0)
        self.bias_branches = nn.ModuleList([branch])
        self.bias_gate = NormSelector(self.width, 1, self.gate)
        self.r2 = self.r2[:1].clone()
        self.statistics = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float32, device=self.r2.device)

    def drop_frozen_gradients(self) -> None:
        """Sets the selector's gradients to None while it is frozen: call it between `backward` (and clipping) and the
        optimizer's step, as `GateFreezeCallback` does, else momentum and weight decay go on moving it."""
        if self.scalar("frozen"):
            for p in self.bias_gate.parameters():
                p.grad = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, forwards in eval mode fill `statistics` too."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    # --- the formula -----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor | None = None, **kwargs: Any) -> Tensor:
        """x: whatever shape the original takes (also under its own keyword). Returns what the original would: same
        shape, dtype and layout."""
        x, original = self._call_original(x, kwargs)
        self._sync_scalars()
        if self._is_zero:
            y = original(x)
            return with_zero_gradients(y, self.new_parameters()) if self.training else y
        if (mixture := lean_forward(self, x, next(iter(kwargs), None))) is not None:
            return mixture
        alone = self.replaces and self._is_one
        y = None if alone else original(x)
        dtype = self._output_dtype(x, original) if alone else y.dtype
        with without_autocast(x):
            mixture = self._mix(x.to(torch.promote_types(x.dtype, torch.float32)), y)
        mixture = mixture.to(dtype)
        if alone:
            return lay_out(mixture, x, self.layout)
        return mixture if mixture.stride() == y.stride() else torch.empty_like(y).copy_(mixture)

    def _mix(self, x: Tensor, y: Tensor | None) -> Tensor:
        if x.device != self.strength.device:  # under a device_map the original's own hook has moved its input
            x = x.to(self.strength.device)
        mask = None if self.mask_holder is None else self.mask_holder.mask
        strength = self._lambda()
        outputs = [branch(x, mask) for branch in self.bias_branches]
        if self.replaces:
            total = sum(outputs) / len(outputs)
            if y is not None:
                return (1 - strength) * y.to(x.dtype) + strength * total
            # At full strength the original's parameters are out of play; see `with_zero_gradients`.
            return with_zero_gradients(total, self.original.parameters()) if self.training else total
        weights, log_p = self.bias_gate(
            x.movedim(self.channel_axis, -1),
            mask,
            frozen=self.frozen if self.training and self._is_frozen else None,
            noisy=self.training and not self._is_frozen,
        )
        if x.numel():
            self._record(log_p)
        first, *others = (self._per_channel(w) for w in weights.split(1, dim=-1))
        total = (1 - strength * (1 - first)) * y.to(x.dtype)
        for weight, output in zip(others, outputs):
            total = total + (strength * weight) * output
        return total

    def _per_channel(self, weight: Tensor) -> Tensor:
        """(…, 1), channels last → broadcastable along the channel axis of x."""
        return weight if weight.dim() == 1 else weight.movedim(-1, self.channel_axis)

    @torch.no_grad()
    def _record(self, log_p: Tensor) -> None:
        if (self.training or self._recording) and self.bias_gate.learns:
            p = log_p.detach().exp()
            entropy = -(p * log_p.detach()).sum(-1, keepdim=True)
            values = torch.cat([p, entropy], dim=-1).reshape(-1, self.statistics.numel()).mean(0)
            self.statistics.copy_(values)

    @torch.no_grad()
    def _output_dtype(self, x: Tensor, original) -> torch.dtype:
        """The dtype that the original would return here: one token through it tells, autocast and all."""
        if x.numel() == 0:
            return x.dtype
        token = x
        for axis in range(x.dim()):
            if axis != self.channel_axis % x.dim():
                token = token.narrow(axis, 0, 1)
        return original(token).dtype

    def extra_repr(self) -> str:
        values = {name: "?" if self._buffers[name].is_meta else f"{self.scalar(name):g}" for name in self._scalars}
        return (
            f"{self.width}, branches={list(self.branch_names)}, gate={self.gate.kind}/{self.gate.granularity}, "
            f"strength={values['strength']}, frozen={values['frozen'] != '0'}"
        )


def autonorms(model: nn.Module) -> list[tuple[str, AutoNorm]]:
    """All AutoNorm layers with their names, each object once."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, AutoNorm)]


__all__ = ["AutoNorm", "Branch", "MaskHolder", "UNCALIBRATED", "autonorms", "valid_tokens"]
