"""Affine-like and norm-like layers: linear maps whose own update is not amplified by ‖x‖² (arXiv 2512.22247).

One SGD step on one sample with loss gradient δ at the output z moves z by −η(‖x‖² + 1)δ in an affine layer, by exactly
−ηδ in an affine-like one, and by −2ηδ in a norm-like one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .affine_function import CorrectedLinear
from .lengths import divide, divisor, squared_norm
from .wrapper import Wrapper, ordinary, own_parameter, unhooked


def has_bias(module: nn.Module) -> bool:
    """Whether an affine map adds a constant: a bias of its own, or one in a layer that it wraps (LoRA)."""
    own = getattr(module, "bias", None)
    if own is not None:
        return not callable(own) or own() is not None  # torch's own quantised layers have a method
    inside = (*module.named_parameters(), *module.named_buffers()) if module._modules else ()
    return any(name.endswith(".bias") for name, _ in inside)


class Correction(Wrapper):
    """Base of the layers that divide an affine map by the length of its input.

    The divisor is d = (1 − λ) + λ·n/g with the strength λ and the gain g, a buffer of shape (1,): 1 is the paper;
    calibration sets it so that a pretrained layer keeps its scale. With a bias, n is sqrt(‖x‖² + 1) in the affine-like
    form: 1 is the squared length of the constant input that the bias multiplies. Without one, and in the norm-like
    form, n = ‖x‖. Where d vanishes (x = 0 at λ = 1 in the latter) the layer is the original, so are its gradients. NaN
    gives NaN, an infinite input NaN.

    No parameter is added. Length and divisor are computed in fp32 or wider, safe from overflow.
    """

    form = "affine_like"

    def __init__(self, original: nn.Module, strength: float = 1.0) -> None:
        super().__init__(original, strength)
        self._add_scalar("gain", 1.0)

    def forward(self, x: Tensor | None = None, **kwargs: Any) -> Tensor:
        """x: what the original takes (also under its own keyword). Returns the shape, dtype and layout it would."""
        x, original = self._call_original(x, kwargs)
        self._sync_scalars()
        if self._is_zero:
            return original(x)
        free = torch.compiler.is_compiling() or self.gain.requires_grad  # the latter while `calibrate` tunes it
        gain = self.gain if free else self._values["gain"]
        return self._correct(x, original, self._lambda(), gain)

    def _correct(self, x: Tensor, original, strength: float | Tensor, gain: float | Tensor) -> Tensor:
        raise NotImplementedError

    def _squares(self, x: Tensor) -> Tensor:
        """‖x‖² of what each output sees, broadcastable to the output."""
        raise NotImplementedError

    @torch.no_grad()
    def step_factor(self, x: Tensor) -> Tensor:
        """How far one SGD step on a sample alone moves its own output, in units of −ηδ (δ = ∂L/∂z).

        With z = W u + c·b this is ‖u‖² + c²: ‖x‖² + 1 at λ = 0 (the paper's sample-wise bias), at λ = 1 and gain 1
        it is 1 for affine-like and 2 for norm-like layers with a bias. Shape: the output's, with 1 on the channel
        axis (or the output's channels, where a convolution has groups); float64.
        """
        biased = has_bias(self.original)
        constant = self.form == "affine_like" and biased
        squares = self._squares(x)
        d = divisor(squares, constant, self.scalar("strength"), self.scalar("gain"))
        return squares / d**2 + (1 / d**2 if constant else float(biased))

    @torch.no_grad()
    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """(u, c): at full strength the layer gives gain·u + c. c is the bias in the norm-like form, else 0."""
        y = self._correct(x, self.original, 1.0, 1.0)
        if self.form == "affine_like" or not has_bias(self.original):
            return y, 0.0
        c = self.original(self._zero_input(x))
        return y - c, c

    def _zero_input(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x.reshape(-1, x.shape[-1])[:1])

    def extra_repr(self) -> str:
        values = ("?" if self._buffers[name].is_meta else f"{self.scalar(name):g}" for name in self._scalars)
        return ", ".join(f"{name}={value}" for name, value in zip(self._scalars, values))


def is_plain(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether calling `module` runs the forward of one of `classes`, and no hook sees what it computes."""
    return type(module).forward in [c.forward for c in classes] and unhooked(module)


class AffineLike(Correction):
    """f(x) / ((1 − λ) + λ·sqrt(‖x‖² + 1)/g), f the wrapped affine map of the last axis (arXiv 2512.22247).

    Args:
        original: a linear layer of any kind: nn.Linear, GPT-2's Conv1D, quantised, or wrapped by LoRA. Without a bias
            this is `NormLike`: W x / ((1 − λ) + λ·‖x‖/g).
        strength: λ.
    """

    channel_axis = -1

    def _squares(self, x: Tensor) -> Tensor:
        return squared_norm(x)

    def _correct(self, x: Tensor, original, strength: float | Tensor, gain: float | Tensor) -> Tensor:
        constant = self.form == "affine_like" and has_bias(self.original)
        if isinstance(strength, float) and isinstance(gain, float) and self._is_one_function(x, constant):
            weight, bias = self.original.weight, self.original.bias
            return CorrectedLinear.apply(x, weight, bias, constant, strength, gain)
        d = divisor(self._squares(x), constant, strength, gain)
        # W(x/d) + b = f(x/d): the bias stays outside without being known, and nothing cancels at small ‖x‖.
        if not constant:
            return original(divide(x, d))
        return divide(original(x), d, in_place=is_plain(self.original, (nn.Linear,)))

    def _is_one_function(self, x: Tensor, constant: bool) -> bool:
        """Whether x goes through a plain nn.Linear in its own dtype, and nobody looks inside."""
        linear = self.original
        if not is_plain(linear, (nn.Linear,)) or not ordinary(x) or torch.is_autocast_enabled(x.device.type):
            return False
        # W x overflows in half precision where W (x/d) does not.
        if x.device.type == "mps" or (x.dtype == torch.float16 and not constant):
            return False
        own = [p for p in (linear.weight, linear.bias) if p is not None]
        same = all(p.dtype == x.dtype and own_parameter(p, x) for p in own)
        return same and x.dim() > 0 and x.shape[-1] == linear.weight.shape[-1]


class NormLike(AffineLike):
    """W x / ((1 − λ) + λ·‖x‖/g) + b for the wrapped affine map f(x) = W x + b; b at x = 0 (arXiv 2512.22247).

    Arguments as for `AffineLike`.
    """

    form = "norm_like"
