"""The settings of a patch: two dataclasses, JSON both ways, strict keys."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, nearest

GATE_KINDS = ("gumbel", "softmax", "hard", "random", "fixed")
GRANULARITIES = ("token", "sequence", "layer")
CORRECTIONS = ("affine_like", "norm_like")
FUSED = ("auto", "on", "off")


def _choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{name}={value!r} is unknown; choose one of {', '.join(known)} ({nearest(str(value), known, 1)})"
        )


def in_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError unless `value` is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be a number in [{low}, {high}]")


def _known_branches(name: Any, known: Iterable[str]) -> str:
    return (
        f"; choose one of {', '.join(known)} ({nearest(str(name), known, 1)}). A branch of your own is known once the "
        "file with its @register_branch is imported (by the command line: hf-autonorm --import FILE …)"
    )


@dataclass(frozen=True)
class _Strict:
    """JSON both ways; a key that is no field is an error, never ignored."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        known = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{cls.__name__} has no field {key!r}; {nearest(key, known)}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str):
        return cls.from_dict(json.loads(text))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def replace(self, **changes: Any):
        """A copy with some fields changed; an unknown field is a `ConfigError`."""
        return type(self).from_dict({**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes})


@dataclass(frozen=True)
class GateConfig(_Strict):
    """How AutoNorm's gate weighs the model's own norm against the branches.

    Attributes:
        kind: "gumbel": a soft Gumbel sample while training, the mean in eval (the paper); "softmax": no noise; "hard":
            a one-hot sample with a straight-through gradient; "random": uniform random weights, nothing is learned;
            "fixed": the constant `value`.
        granularity: "token": one weight per token (safe with causal masks, padding and caches); "sequence": one per
            sequence, from the mean over its valid tokens (refused on causal decoders); "layer": one, for any input.
        hidden: width of the selector's hidden layer; a float below 1 is a share of the norm's width.
        tau: temperature of the Gumbel sample, > 0.
        init_norm_weight: the original norm's weight at the start: 0.9 for a pretrained model, 0.5 from scratch.
        value: with kind="fixed" the constant weight of the original norm, in [0, 1].

    Raises ConfigError where a value is unknown or out of range.
    """

    kind: str = "gumbel"
    granularity: str = "token"
    hidden: int | float = 16
    tau: float = 0.5
    init_norm_weight: float = 0.9
    value: float | None = None

    def __post_init__(self) -> None:
        _choice("gate kind", self.kind, GATE_KINDS)
        _choice("gate granularity", self.granularity, GRANULARITIES)
        if isinstance(self.tau, bool) or not isinstance(self.tau, (int, float)) or not 0 < self.tau < float("inf"):
            raise ConfigError(f"tau={self.tau!r} must be a finite number > 0; for a one-hot gate use kind='hard'")
        if isinstance(self.hidden, bool) or not isinstance(self.hidden, (int, float)) or not 0 < self.hidden < 1e9:
            raise ConfigError(f"hidden={self.hidden!r} must be a whole number ≥ 1 or a share of the width in (0, 1)")
        if self.hidden >= 1 and int(self.hidden) != self.hidden:
            raise ConfigError(f"hidden={self.hidden!r} must be a whole number ≥ 1 or a share of the width in (0, 1)")
        in_range("init_norm_weight", self.init_norm_weight, 0.0, 1.0)
        if self.kind == "fixed":
            if self.value is None:
                raise ConfigError("kind='fixed' needs value=…, the constant weight of the original norm in [0, 1]")
            in_range("value", self.value, 0.0, 1.0)
        else:
            if self.value is not None:
                raise ConfigError(f"value={self.value!r} is only read with kind='fixed', not with {self.kind!r}")
            if self.init_norm_weight in (0, 1) and self.kind != "random":
                raise ConfigError(
                    f"init_norm_weight={self.init_norm_weight!r}: a learned gate starts strictly between 0 and 1 "
                    "(its logits are finite); for a constant use kind='fixed'"
                )

    def hidden_width(self, width: int) -> int:
        """Units in the selector's hidden layer for a norm of `width` channels."""
        return max(1, int(self.hidden if self.hidden >= 1 else self.hidden * width))


@dataclass(frozen=True)
class PatchConfig(_Strict):
    """What `patch` changes, and into what: its keywords are these fields.

    Attributes:
        norm: "autonorm"; the name of a branch, which then replaces the norm ("dyt", "rms_norm", …; "identity": no norm
            at all, where corrected layers follow it); None: leave norms alone.
        linear: "affine_like", "norm_like", or None: leave linear layers alone.
        conv: the same for convolutions (PatchNorm).
        branches: AutoNorm's branches beside the original norm.
        gate: AutoNorm's gate.
        include: which modules: a string is a regular expression that matches the whole dotted name, a list holds exact
            names or name suffixes (PEFT's grammar); None: all.
        exclude: which modules not; the same grammar.
        heads: patch task heads (classifiers) too; output embeddings never are.
        strength: 0: the original bit for bit; 1: the paper's formula.
        dyt_alpha: α of pointwise branches before calibration.
        seed: of the new parameters; the global random state is unchanged.
        fused: compiled AutoNorm layers: "auto" (where the input is large enough to pay), "on" or "off". The
            environment variable HF_AUTONORM_FUSED (auto, 1 or 0) comes first.

    Raises ConfigError where a value is unknown or out of range.
    """

    norm: str | None = "autonorm"
    linear: str | None = None
    conv: str | None = None
    branches: list[str] = field(default_factory=lambda: ["dyt"])
    gate: GateConfig = field(default_factory=GateConfig)
    include: str | list[str] | None = None
    exclude: str | list[str] | None = None
    heads: bool = False
    strength: float = 1.0
    dyt_alpha: float = 0.5
    seed: int = 0
    fused: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.gate, dict):
            object.__setattr__(self, "gate", GateConfig.from_dict(self.gate))
        if not isinstance(self.gate, GateConfig):
            raise ConfigError(f"gate={self.gate!r} must be a GateConfig, e.g. GateConfig(kind='softmax')")
        if isinstance(self.branches, str):
            raise ConfigError(f"branches={self.branches!r} must be a list, e.g. ['{self.branches}']")
        object.__setattr__(self, "branches", list(self.branches))
        for name in ("linear", "conv"):
            if getattr(self, name) is not None:
                _choice(name, getattr(self, name), CORRECTIONS)
        for name in ("include", "exclude"):
            rule = getattr(self, name)
            if isinstance(rule, (tuple, set)):
                rule = sorted(rule) if isinstance(rule, set) else list(rule)
                object.__setattr__(self, name, rule)
            if not (
                rule is None
                or isinstance(rule, str)
                or (isinstance(rule, list) and all(isinstance(r, str) for r in rule))
            ):
                raise ConfigError(f"{name}={rule!r} must be a regular expression or a list of names")
            if isinstance(rule, str):
                try:
                    re.compile(rule)
                except re.error as error:
                    raise ConfigError(
                        f"{name}={rule!r} is no regular expression ({error}); for exact names pass a list, [{rule!r}]"
                    ) from None
        in_range("strength", self.strength, 0.0, 1.0)
        _choice("fused", self.fused, FUSED)
        if (
            isinstance(self.dyt_alpha, bool)
            or not isinstance(self.dyt_alpha, (int, float))
            or not 0 < self.dyt_alpha < 1e6
        ):
            raise ConfigError(f"dyt_alpha={self.dyt_alpha!r} must be a number > 0")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be a whole number")
        self._check_branches()

    def _check_branches(self) -> None:
        from .nn.branches import BRANCHES  # late: the registry may have grown since import

        if not self.branches or len(set(self.branches)) != len(self.branches):
            raise ConfigError(f"branches={self.branches!r} must name at least one branch, each once")
        for name in self.branches:
            if name not in BRANCHES:
                raise ConfigError(f"branch {name!r} is unknown{_known_branches(name, BRANCHES)}")
        if self.norm is not None and self.norm != "autonorm" and self.norm not in BRANCHES:
            raise ConfigError(
                f"norm={self.norm!r} is unknown: norms become 'autonorm' or one branch, or stay with norm=None"
                f"{_known_branches(self.norm, ('autonorm', *BRANCHES))}"
            )

    def norm_branches(self) -> list[str]:
        """The branches each norm gets: `norm="dyt"` alone is AutoNorm with the gate fixed on `dyt`."""
        return self.branches if self.norm == "autonorm" else [self.norm]

    def norm_gate(self) -> GateConfig:
        """The gate each norm gets, see `norm_branches`."""
        return self.gate if self.norm == "autonorm" else GateConfig(kind="fixed", value=0.0)
