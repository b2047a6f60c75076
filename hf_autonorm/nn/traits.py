"""What a norm does, measured instead of guessed from its class name.

280 norm classes occur in transformers and timm: other names, `1 + w` scales, channels-first axes, no weight, no bias.
A probe of a few tokens tells all of it, for any class, without touching the module.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .offload import real_tensor

_TOLERANCE = 2e-3
# Stated everywhere: `from_pretrained` builds models with meta as the default device and half precision as default
# dtype.
_PLAIN = {"device": "cpu", "dtype": torch.float32}
# (channel axis, shape of a probe; D stands for the width). The other sizes are no width that occurs.
_PROBES: tuple[tuple[int, tuple[int | str, ...]], ...] = (
    (-1, (2, 3, "D")),
    (-1, (2, 3, 5, "D")),
    (1, (2, "D", 3, 5)),
    (1, (2, "D", 5)),
    (1, (2, "D", 3, 1, 5)),
    (-1, (7, "D")),  # last, and only where no other rank is taken: on it a GroupNorm of one group is a LayerNorm
)


class NotANorm(UnsupportedError):
    """The module is no LayerNorm- or RMSNorm-like map; the message says why."""


@dataclass(frozen=True)
class NormTraits:
    """The measured behaviour of a norm f(x) = weight ⊙ n(x) + bias.

    `weight` and `bias` are fp32 CPU tensors of shape `(width,)`, the *effective* scale and shift (1+w is resolved, a
    constant scale such as 1/√D too). On a meta norm they are those of a random stand-in and mean nothing.
    """

    width: int
    channel_axis: int  # -1, or 1 for channels-first
    centered: bool  # the mean is removed (LayerNorm), or not (RMSNorm)
    weight: Tensor
    bias: Tensor
    learns_weight: bool  # the norm has a scale parameter
    learns_bias: bool  # the norm has a shift parameter
    layout: str  # memory layout of the output: "contiguous", "input" (strides kept) or "channels_last"


def stand_in(norm: nn.Module, values: bool = True) -> nn.Module:
    """A copy of `norm` for probing: fp32 on the CPU, without hooks; a meta parameter becomes a random one, as do all
    without `values`.

    Only the containers are copied, so that nothing large is; the class's own `forward` is to be called on it (an
    instance may carry accelerate's wrapped one).
    """
    clone = copy.copy(norm)
    generator = torch.Generator().manual_seed(0)

    def real(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = real_tensor(norm, name, tensor)
        if tensor.is_meta or (not values and isinstance(tensor, nn.Parameter)):
            return torch.rand(tensor.shape, generator=generator, **_PLAIN) + 0.5
        plain = tensor.detach().to(device="cpu", copy=True)
        return plain.float() if plain.is_floating_point() else plain

    clone.__dict__["_parameters"] = {
        name: p if p is None else nn.Parameter(real(name, p), requires_grad=False)
        for name, p in norm._parameters.items()
    }
    clone.__dict__["_buffers"] = {name: real(name, b) for name, b in norm._buffers.items()}
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        clone.__dict__[hooks] = OrderedDict()
    for name in ("forward", "_hf_hook", "_old_forward"):
        clone.__dict__.pop(name, None)
    return clone


def width_of(norm: nn.Module) -> int:
    """The number of channels: `normalized_shape`, or the length of a one-dimensional parameter."""
    shape = getattr(norm, "normalized_shape", None)
    if isinstance(shape, int):
        shape = (shape,)
    if isinstance(shape, (tuple, list, torch.Size)):
        if len(shape) != 1:
            raise NotANorm(f"normalises over {len(shape)} axes at once, a branch works on one channel axis")
        return int(shape[0])
    sizes = {
        p.numel() for p in list(norm._parameters.values()) + list(norm._buffers.values()) if p is not None and p.ndim
    }
    sizes.discard(1)
    if len(sizes) > 1:
        raise NotANorm("has parameters of several sizes")
    if not sizes:
        raise NotANorm("norm of unknown width (no parameter and no normalized_shape)")
    return sizes.pop()


def normalize(x: Tensor, centered: bool, axis: int = -1) -> Tensor:
    """LayerNorm's (x − μ)/σ or RMSNorm's x/rms along `axis`, without ε or affine part (for probing in float64)."""
    if centered:
        x = x - x.mean(axis, keepdim=True)
    return x / x.square().mean(axis, keepdim=True).sqrt()


def measure(norm: nn.Module, values: bool = True) -> NormTraits:
    """Measures `norm`, or raises `NotANorm` with the reason why it is none.

    Works on every device including meta, draws no global random number, calls no hook, leaves `norm` as it is.
    `values=False`: the parameters are not loaded yet, take none of their values for real.
    """
    # Whether a class is a norm must not hang on the values it has today: one that scales its input looks like one as
    # long as the scale is 1. Random parameters tell, once for all norms of a kind (a large model has many of few).
    kind = _measured_kind(norm)
    if (
        not values
        or all(t.is_meta for t in norm.state_dict(keep_vars=True).values())
        and not hasattr(norm, "_hf_hook")
    ):
        return kind
    return _measure(norm, kind) if norm._parameters else kind


_KINDS: dict[tuple, NormTraits | NotANorm] = {}


def _measured_kind(norm: nn.Module) -> NormTraits:
    settings = {name: value for name, value in vars(norm).items() if not name.startswith("_") and name != "training"}
    shapes = [(name, tuple(t.shape)) for name, t in norm.state_dict(keep_vars=True).items()]
    key = (type(norm), norm.extra_repr(), str(settings), str(shapes))
    if key not in _KINDS:
        try:
            _KINDS[key] = _measure(norm)
        except NotANorm as error:
            _KINDS[key] = error
    found = _KINDS[key]
    if isinstance(found, NotANorm):
        raise NotANorm(str(found))
    return found


@torch.no_grad()
def _measure(norm: nn.Module, kind: NormTraits | None = None) -> NormTraits:
    """Tells the kind, from random parameters; or, given the kind, reads scale and shift off the present ones."""
    width = width_of(norm)
    clone = stand_in(norm, values=kind is not None)
    clone.__dict__["training"] = False
    forward = type(norm).forward.__get__(clone)
    refusals = 0
    # The probe must not see the caller's autocast or default device (entering a device context is slow: if needed).
    default = torch.get_default_device()
    on_cpu = contextlib.nullcontext() if default.type == "cpu" else torch.device("cpu")
    with torch.autocast("cpu", enabled=False), on_cpu:
        for axis, pattern in _PROBES:
            if len(pattern) == 2 and refusals < len(_PROBES) - 1:
                break
            if kind is not None and axis != kind.channel_axis:
                continue
            shape = tuple(width if isinstance(size, str) else size for size in pattern)
            try:
                found = _measure_on(forward, shape, axis, width, kind)
            except Exception:  # a norm may refuse a rank in any way it likes; another probe may fit
                refusals += 1
                continue
            if found is not None:
                centered, weight, bias = found
                return NormTraits(
                    width=width,
                    channel_axis=axis,
                    centered=centered,
                    weight=_exact(weight, norm, clone),
                    bias=bias,
                    learns_weight=any(not _is_shift(name) for name in _vectors(clone, width)),
                    learns_bias=any(_is_shift(name) for name in _vectors(clone, width)),
                    layout=kind.layout if kind else _layout(forward, shape, axis),
                )
    if refusals == len(_PROBES):
        raise NotANorm("its forward takes no single tensor")
    raise NotANorm("its output is no scaled and shifted LayerNorm or RMSNorm of its input")


def _measure_on(forward, shape: tuple[int, ...], axis: int, width: int, kind: NormTraits | None):
    """(centered, weight, bias) of the norm on this shape; None where it does something else (no known kind does)."""
    generator = torch.Generator().manual_seed(1)
    # Signs times a large length: n(x) = ±1 whatever ε is, so one pair x, −x gives weight and bias exactly.
    signs = torch.ones(width, **_PLAIN)
    signs[torch.randperm(width, generator=generator, device="cpu")[: width // 2]] = -1
    probe = (
        (1e3 * signs)
        .view([width if i == axis % len(shape) else 1 for i in range(len(shape))])
        .expand(shape)
        .contiguous()
    )
    up, down = forward(probe), forward(-probe)
    if not isinstance(up, Tensor) or up.shape != probe.shape:
        return None
    to_rows = lambda t: t.double().movedim(axis, -1).reshape(-1, width)  # noqa: E731
    bias = (to_rows(up) + to_rows(down))[0] / 2
    if kind is not None:
        unit = normalize(to_rows(probe), kind.centered)[0]
        return kind.centered, ((to_rows(up) - to_rows(down))[0] / 2 / unit).float(), bias.float()
    x = 3 + 100 * torch.randn(shape, generator=generator, **_PLAIN)
    y = to_rows(forward(x))
    for centered in (True, False):
        unit = normalize(to_rows(probe), centered)[0]
        weight = (to_rows(up) - to_rows(down))[0] / 2 / unit
        reference = weight * normalize(to_rows(x), centered) + bias
        size = reference.square().mean().sqrt()
        if width > 1 and size > 0 and (y - reference).abs().max() <= _TOLERANCE * y.abs().max():
            return centered, weight.float(), bias.float()
    return None


def _vectors(norm: nn.Module, width: int) -> dict[str, Tensor]:
    return {name: p for name, p in norm._parameters.items() if p is not None and p.numel() == width}


def _is_shift(name: str) -> bool:
    return "bias" in name or "beta" in name


def _exact(weight: Tensor, norm: nn.Module, clone: nn.Module) -> Tensor:
    """The measured scale, replaced by w or 1 + w where it is one of them up to rounding."""
    for name, p in _vectors(clone, weight.numel()).items():
        if not _is_shift(name):
            for exact in (p.detach().flatten(), 1 + p.detach().flatten()):
                if torch.allclose(exact, weight, rtol=1e-4, atol=1e-5):
                    return exact.clone()
    return weight


def _layout(forward, shape: tuple[int, ...], axis: int) -> str:
    """How the output lies in memory: a replacement must lie the same way, or a later `.view` breaks."""
    plain = torch.ones(shape, **_PLAIN)
    if not forward(plain).is_contiguous():
        return "channels_last"
    permuted = torch.ones([shape[1], shape[0], *shape[2:]], **_PLAIN).transpose(0, 1)
    if axis == 1:  # keep the channel axis, swap the outer spatial one
        permuted = torch.ones([shape[0], *reversed(shape[1:])], **_PLAIN).permute(0, *range(len(shape) - 1, 0, -1))
    return "input" if forward(permuted).stride() == permuted.stride() else "contiguous"


def lay_out(y: Tensor, x: Tensor, layout: str) -> Tensor:
    """`y` in the memory layout that a norm of this `layout` gives for the input `x`."""
    if layout == "input":
        return y if y.stride() == x.stride() else torch.empty_like(x, dtype=y.dtype).copy_(y)
    if layout == "channels_last":
        return y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y.contiguous()
