"""PatchNorm: the affine-like and norm-like correction of a convolution (arXiv 2512.22247)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import CORRECTIONS
from ..errors import ConfigError, UnsupportedError, nearest
from .affine import Correction, has_bias, is_plain
from .lengths import divide, divisor, squared_norm
from .wrapper import without_autocast

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class PatchNorm(Correction):
    """A convolution, each output divided by the length of the patch (of its group's channels) that it sees.

    With x_p the patch, d_p = (1 − λ) + λ·n_p/g: affine-like is f(x)_p / d_p with n_p = sqrt(‖x_p‖² + 1), norm-like is
    W x_p / d_p + b with n_p = ‖x_p‖. Without a bias both are W x_p / d_p with n_p = ‖x_p‖. ‖x_p‖² is one convolution
    of Σ_c x² with ones; the padding counts as what it is filled with.

    Args:
        original: an nn.Conv1d, Conv2d or Conv3d, with any groups, stride, dilation, padding and padding mode; also one
            wrapped by LoRA.
        form: "affine_like" or "norm_like".
        strength: λ.

    Raises UnsupportedError for a transposed convolution, where an output sums over several patches.
    """

    def __init__(self, original: nn.Module, form: str = "affine_like", strength: float = 1.0) -> None:
        if form not in CORRECTIONS:
            raise ConfigError(
                f"form={form!r} is unknown; choose one of {', '.join(CORRECTIONS)} ({nearest(form, CORRECTIONS, 1)})"
            )
        conv = innermost(original)
        if getattr(conv, "transposed", False) or not hasattr(conv, "kernel_size"):
            raise UnsupportedError(f"PatchNorm wraps nn.Conv1d, Conv2d and Conv3d, not {type(conv).__name__}")
        super().__init__(original, strength)
        self.form = form
        self.channel_axis = -len(conv.kernel_size) - 1  # counted from the end: unbatched input is allowed

    def _correct(self, x: Tensor, original: Any, strength: float | Tensor, gain: float | Tensor) -> Tensor:
        biased = has_bias(self.original)
        constant = self.form == "affine_like" and biased
        with without_autocast(x):
            squares = self._squares(x)
            d = divisor(squares, constant, strength, gain)
        if constant or not biased:
            return divide(original(x), d, in_place=is_plain(self.original, _CLASSES))
        return self._keep_bias_out(x, original, d)

    def _squares(self, x: Tensor) -> Tensor:
        """‖x_p‖² of each output position, in float64: (batch, 1 or out_channels, *positions), or without the batch."""
        conv = innermost(self.original)
        spatial, groups = len(conv.kernel_size), conv.groups
        grouped = x.unflatten(self.channel_axis, (groups, x.shape[self.channel_axis] // groups))
        squares = squared_norm(grouped, self.channel_axis).squeeze(self.channel_axis)
        lead, size = squares.shape[:-spatial], squares.shape[-spatial:]
        maps = squares.reshape(-1, 1, *size)  # one channel each
        padding = conv.padding
        if conv.padding_mode != "zeros":
            maps, padding = F.pad(maps, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        if torch.compiler.is_exporting():  # ONNX Runtime convolves in fp32 at most
            maps = maps.float()
        ones = maps.new_ones(1, 1, *conv.kernel_size)
        maps = _CONVOLVE[spatial](maps, ones, None, conv.stride, padding, conv.dilation)
        squares = maps.reshape(*lead, *maps.shape[-spatial:])
        return squares if groups == 1 else squares.repeat_interleave(conv.out_channels // groups, self.channel_axis)

    def _keep_bias_out(self, x: Tensor, original: Any, d: Tensor) -> Tensor:
        """W x_p / d_p + b."""
        conv = self.original
        if is_plain(conv, _CLASSES):
            quotient = divide(conv._conv_forward(x, conv.weight, None), d, in_place=True)
            return quotient + self._along_channels(conv.bias, quotient)
        # Someone must see the original being called, or it computes more than its weight says: take the bias out of
        # its output. Of the two forms one is exact at d = 1, the other does not blow up b's rounding at small d.
        y = original(x)
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        d = d.to(wide.dtype)
        bias = original(self._zero_input(x)).to(wide.dtype)
        small, at_least_one = d < 1, d.clamp(min=1)  # no infinite derivative in the form that is not taken
        large = wide / at_least_one + bias * (1 - 1 / at_least_one)
        result = torch.where(small, (wide - bias) / d + bias, large).to(y.dtype)
        return result if result.stride() == y.stride() else torch.empty_like(y).copy_(result)

    def _along_channels(self, bias: Tensor, y: Tensor) -> Tensor:
        return bias.to(y.dtype).view(-1, *[1] * (-self.channel_axis - 1))

    def _zero_input(self, x: Tensor) -> Tensor:
        batched = x.dim() == 1 - self.channel_axis
        return torch.zeros_like(x[:1] if batched else x)

    def extra_repr(self) -> str:
        return f"form={self.form}, {super().extra_repr()}"


def innermost(module: nn.Module) -> nn.Module:
    """The convolution itself, where PEFT's layers are around it."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer
    return module
