"""The alternatives that AutoNorm's gate weighs against the model's own norm, and the registry to add one's own.

@register_branch("softsign")
class SoftSign(PointwiseBranch):
    def curve(self, z):
        return z / (1 + z.abs())
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .functional import root_of_one_plus_square
from .traits import NormTraits, measure
from .wrapper import Fp32Buffers

BRANCHES: dict[str, type[Branch]] = {}
_TAKEN = ("autonorm", "norm", "none")  # the gated layer, the original in reports, no norm on the command line


def register_branch(name: str) -> Callable[[type], type]:
    """Class decorator: makes a `Branch` subclass known as `name` in `PatchConfig.branches` and `norm=name`.

    The same name must be registered again before a model that was saved with it is loaded.

    Raises ConfigError for a name that is none (letters, digits, `_` and `-`) or is taken, and for a class that lacks
    what a branch needs: `curve` of a PointwiseBranch, `forward` of another Branch.
    """
    if isinstance(name, type):
        raise ConfigError(f'register_branch takes a name: @register_branch("{name.__name__.lower()}")')
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ConfigError(
            f"branch name {name!r} must be a word of letters, digits, '_' and '-', e.g. 'softsign': it stands in "
            "configs, tables and command lines"
        )

    def register(cls: type) -> type:
        if not (isinstance(cls, type) and issubclass(cls, Branch)):
            raise ConfigError(f"branch {name!r}: {cls!r} must be a subclass of hf_autonorm.nn.Branch")
        known = BRANCHES.get(name)
        if name in _TAKEN or (known is not None and known.__qualname__ != cls.__qualname__):
            raise ConfigError(f"branch {name!r} is already registered; choose another name")
        if cls.pointwise and not issubclass(cls, PointwiseBranch):
            raise ConfigError(f"branch {name!r}: {cls.__name__} is pointwise, so it must be a PointwiseBranch")
        if cls.pointwise and cls.curve is PointwiseBranch.curve:
            raise ConfigError(f"branch {name!r}: {cls.__name__} must define curve(self, z)")
        if cls.forward is Branch.forward:
            raise ConfigError(f"branch {name!r}: {cls.__name__} must define forward(self, x, mask=None)")
        BRANCHES[name] = cls
        return cls

    return register


class Branch(Fp32Buffers):
    """One alternative to the wrapped norm. Input and output have the norm's shape; the work is done in fp32 or wider.

    Args:
        norm: the wrapped norm; it is only read.
        traits: its measured behaviour; None measures it here.
        alpha: initial slope of pointwise branches.
        device: of the new parameters.
        dtype: likewise.

    A branch learns a scale (shift) exactly where the norm does; elsewhere the scale is a constant in a buffer.

    NaN gives NaN. An infinite value gives the limit ±1, scaled and shifted, in `dyt` and `derf`, itself in `identity`,
    and NaN in the others.
    """

    pools_sequence = False  # True: looks at other positions of the sequence (refused on causal decoders)
    pointwise = False  # True: y = weight ⊙ curve(α x) + bias, which `calibrate` fits in closed form

    def __init__(
        self,
        norm: nn.Module,
        traits: NormTraits | None = None,
        *,
        alpha: float = 0.5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._traits = traits = traits or measure(norm)
        self.width, self.channel_axis, self.initial_alpha = traits.width, traits.channel_axis, alpha
        self._factory = {"device": device, "dtype": dtype}
        weight = torch.empty(traits.width, **self._factory)
        if traits.learns_weight:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        self.bias = nn.Parameter(torch.empty(traits.width, **self._factory)) if traits.learns_bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """weight and bias from the norm's own effective scale and shift (1+w and constant scales resolved)."""
        if not self.weight.is_meta:
            self.weight.copy_(self._traits.weight)
            if self.bias is not None:
                self.bias.copy_(self._traits.bias)

    def affine(self, n: Tensor) -> Tensor:
        """weight ⊙ n + bias along the channel axis."""
        y = n * self._along_channels(self.weight, n)
        return y if self.bias is None else y + self._along_channels(self.bias, n)

    def _along_channels(self, vector: Tensor, x: Tensor) -> Tensor:
        vector = vector.to(x.dtype)
        return vector if self.channel_axis == -1 else vector.view(-1, *[1] * (x.dim() - 2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: any shape with `width` channels on the channel axis; mask: (batch, tokens), True where valid, or None."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.width}, channel_axis={self.channel_axis}"


class PointwiseBranch(Branch):
    """y = weight ⊙ curve(α x) + bias. Subclasses give `curve`.

    α is `alpha`, a parameter of shape (1,), times `alpha_scale`, a buffer that is 1 until calibration: a norm whose
    inputs are large needs an α of 0.001, which an optimizer's first steps of the size of the learning rate would
    throw about. Calibration puts the size into the scale and leaves the parameter at its usual one.
    """

    pointwise = True

    def __init__(self, norm: nn.Module, traits: NormTraits | None = None, **kwargs) -> None:
        super().__init__(norm, traits, **kwargs)
        self.alpha = nn.Parameter(torch.empty(1, **self._factory))
        self.register_buffer("alpha_scale", torch.ones(1, dtype=torch.float32, device=self._factory["device"]))

    def _fp32_buffers(self) -> tuple[str, ...]:
        return ("alpha_scale",)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.alpha.fill_(self.initial_alpha)
        self.alpha_scale.fill_(1.0)

    def slope(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """α, shape (1,)."""
        return self.alpha.to(dtype) * self.alpha_scale.to(dtype)

    @torch.no_grad()
    def set_slope(self, alpha: float) -> None:
        """Makes α this value, by the scale alone."""
        self.alpha.fill_(self.initial_alpha)
        self.alpha_scale.copy_(alpha / self.alpha.double())

    def curve(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.affine(self.curve(x * self.slope(x.dtype)))


@register_branch("dyt")
class DyT(PointwiseBranch):
    """Dynamic Tanh, weight ⊙ tanh(αx) + bias (arXiv 2503.10622, eq. 2)."""

    def curve(self, z: Tensor) -> Tensor:
        return torch.tanh(z)


@register_branch("dyisru")
class DyISRU(PointwiseBranch):
    """Dynamic inverse square root unit, weight ⊙ αx/√(1 + (αx)²) + bias: the map that removing the channel coupling
    from LayerNorm gives exactly, of which Dynamic Tanh is an approximation (arXiv 2503.21708)."""

    def curve(self, z: Tensor) -> Tensor:
        # z·rsqrt(1+z²) is inf·0 for |z| beyond the root of the largest float.
        return z / root_of_one_plus_square(z)


@register_branch("derf")
class Derf(PointwiseBranch):
    """Dynamic erf, weight ⊙ erf(αx + s) + bias, with α and s of shape (1,) (arXiv 2512.10938)."""

    def __init__(self, norm: nn.Module, traits: NormTraits | None = None, **kwargs) -> None:
        super().__init__(norm, traits, **kwargs)
        self.shift = nn.Parameter(torch.empty(1, **self._factory))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.shift.zero_()

    def curve(self, z: Tensor) -> Tensor:
        return torch.erf(z + self.shift.to(z.dtype))


class _Standardizing(Branch):
    """A branch that normalises each token by its own statistics."""

    eps = 1e-6

    def standardize(self, x: Tensor, centered: bool) -> Tensor:
        if centered:
            x = x - x.mean(self.channel_axis, keepdim=True)
        return x * torch.rsqrt(x.square().mean(self.channel_axis, keepdim=True) + self.eps)


@register_branch("rms_norm")
class RMSNormBranch(_Standardizing):
    """weight ⊙ x/√(mean(x²) + ε) + bias (arXiv 1910.07467)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.affine(self.standardize(x, centered=False))


@register_branch("adanorm")
class AdaNorm(_Standardizing):
    """C (1 − k y) ⊙ y with y = (x − μ)/σ, C = 1, k = 0.1, the factor (1 − k y) detached, no affine part
    (arXiv 1911.07013, eq. 9)."""

    factor = 0.1

    def __init__(self, norm: nn.Module, traits: NormTraits | None = None, **kwargs) -> None:
        super().__init__(norm, traits, **kwargs)
        del self.weight, self.bias

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """No parameters."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.standardize(x, centered=True)
        return (1 - self.factor * y).detach() * y


@register_branch("identity")
class Identity(Branch):
    """y = x: no norm at all, for models whose linear layers are corrected (`norm="identity"`, arXiv 2512.22247)."""

    def __init__(self, norm: nn.Module, traits: NormTraits | None = None, **kwargs) -> None:
        super().__init__(norm, traits, **kwargs)
        del self.weight, self.bias

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """No parameters."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


@register_branch("film")
class FiLM(_Standardizing):
    """(weight + Δγ(x̄)) ⊙ n(x) + (bias + Δβ(x̄)): feature-wise linear modulation (arXiv 1709.07871, eq. 2), conditioned
    on the layer's own input x̄, pooled over the valid tokens. Δγ and Δβ come from one hidden layer and start at
    zero."""

    pools_sequence = True
    hidden = 16

    def __init__(self, norm: nn.Module, traits: NormTraits | None = None, **kwargs) -> None:
        super().__init__(norm, traits, **kwargs)
        self.weight_in = nn.Parameter(torch.empty(self.hidden, self.width, **self._factory))
        self.weight_out = nn.Parameter(torch.empty(2 * self.width, self.hidden, **self._factory))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        uniform_fan_in_(self.weight_in, generator)
        self.weight_out.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = x.movedim(self.channel_axis, -1)
        pooled = masked_mean(rows, mask)
        hidden = torch.relu(pooled @ self.weight_in.to(x.dtype).t())
        delta_weight, delta_bias = (hidden @ self.weight_out.to(x.dtype).t()).chunk(2, dim=-1)
        n = self.standardize(x, self._traits.centered)
        shift = delta_bias.movedim(-1, self.channel_axis)
        return self.affine(n) + delta_weight.movedim(-1, self.channel_axis) * n + shift


def masked_mean(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of (batch, …, width) over all axes between, of valid tokens only; shape (batch, 1, …, 1, width).

    Invalid positions never enter (their content may be NaN or inf); a row without a valid token gives zeros.
    mask: (batch, tokens), True where valid; None, or another shape than the rows have: all are valid.
    """
    axes = tuple(range(1, rows.dim() - 1))
    if not axes:
        return rows
    if rows.numel() == 0:  # the mean of nothing is NaN, and its gradient too
        return rows.sum(axes, keepdim=True)
    if mask is None or rows.dim() < 3 or mask.shape != rows.shape[:2]:
        return rows.mean(axes, keepdim=True)
    valid = mask.view(*mask.shape, *[1] * (rows.dim() - 2))
    total = torch.where(valid, rows, torch.zeros((), dtype=rows.dtype, device=rows.device)).sum(axes, keepdim=True)
    others = rows[0, 0].numel() // rows.shape[-1]
    return total / (valid.sum(1, keepdim=True) * others).clamp(min=1)


@torch.no_grad()
def uniform_fan_in_(weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """U(−1/√fan_in, 1/√fan_in), `nn.Linear`'s start, drawn on the CPU in fp32 from `generator`: a seed gives the
    same parameters on every device and leaves the global random state alone."""
    if weight.is_meta:
        return weight
    bound = weight.shape[-1] ** -0.5
    generator = generator or torch.Generator().manual_seed(0)
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
    return weight.copy_(values)


class DynamicTanh(DyT):
    """Dynamic Tanh as a layer of its own: weight ⊙ tanh(αx) + bias (arXiv 2503.10622).

    Args:
        width: channels.
        channel_axis: −1, or 1 for channels-first input.
        alpha: initial slope.
        bias: whether it learns a shift.
    """

    def __init__(
        self, width: int, channel_axis: int = -1, *, alpha: float = 0.5, bias: bool = True, **factory
    ) -> None:
        traits = NormTraits(width, channel_axis, True, torch.ones(width), torch.zeros(width), True, bias, "contiguous")
        super().__init__(nn.Identity(), traits, alpha=alpha, **factory)
        self.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return super().forward(x.to(wide)).to(x.dtype)
