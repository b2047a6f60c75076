"""What in a model is a norm, and why one is left alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..config import PatchConfig
from ..errors import NoMatchError, nearest
from ..nn.traits import NormTraits, NotANorm, measure
from ..nn.wrapper import Wrapper
from .reads import direct_reads, is_read

_OTHER_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, InstanceNorm, SyncBatchNorm
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
_OTHER_NAMES = re.compile(r"batch_?norm|group_?norm|instance_?norm|frozen_?batch|response_?norm|evonorm", re.I)
# Their fused path reads the children's weights directly, in eval mode, from C++.
_FUSED_PARENTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Target:
    """A module that a rule of the patch is about; `reason` says why it is left alone, None where it is patched."""

    name: str
    module: nn.Module
    kind: str  # "norm"
    names: list[str] = field(default_factory=list)  # all names of this object; a shared module has several
    reason: str | None = None
    traits: NormTraits | None = None


class Survey:
    """One walk over a model: every module object once, with all its names and its ancestors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[int, list[str]] = {}
        self.parents: dict[int, list[tuple[nn.Module, str]]] = {}
        self.modules: dict[int, nn.Module] = {}
        self._tied: dict[int, set[int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)
            self.modules[id(module)] = module
        for module in self.modules.values():
            for attribute, child in module._modules.items():
                if child is not None:
                    self.parents.setdefault(id(child), []).append((module, attribute))
            for p in module._parameters.values():
                if p is not None:
                    self._tied.setdefault(id(p), set()).add(id(module))
        self.held_outside = self._held_outside()
        self.dotted = dict(model.named_modules(remove_duplicate=False))

    def ancestors(self, name: str) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
        """(ancestor, path from it), nearest first."""
        parts = name.split(".") if name else []
        for split in range(len(parts) - 1, -1, -1):
            yield self.dotted[".".join(parts[:split])], tuple(parts[split:])

    def shares_parameters(self, module: nn.Module) -> bool:
        """Whether another module object holds one of this one's parameters (tied weights)."""
        return any(len(self._tied[id(p)]) > 1 for p in module._parameters.values() if p is not None)

    def _held_outside(self) -> set[int]:
        """Modules that somebody keeps in a plain list, dict or attribute: a swap in the tree would not reach them."""
        held: set[int] = set()

        def look(value: object, depth: int) -> None:
            if isinstance(value, nn.Module):
                held.add(id(value))
            elif depth and isinstance(value, (list, tuple, set)):
                for item in value:
                    look(item, depth - 1)
            elif depth and isinstance(value, dict):
                for item in value.values():
                    look(item, depth - 1)

        own_tables = {"_modules", "_parameters", "_buffers"}
        for module in self.modules.values():
            if not isinstance(module, Wrapper):
                for attribute, value in module.__dict__.items():
                    if attribute not in own_tables and not attribute.endswith("_hooks"):
                        look(value, 2)
        return held


def rule_matches(rule: str | list[str], name: str) -> bool:
    """PEFT's grammar: a string is a regular expression for the whole dotted name, a list holds names or suffixes."""
    if isinstance(rule, str):
        return re.fullmatch(rule, name) is not None
    return any(name == item or name.endswith("." + item) for item in rule)


def find_targets(model: nn.Module, config: PatchConfig) -> list[Target]:
    """All modules the config's rules are about, in the model's order, each with the reason where it is left alone.

    Raises NoMatchError where `include` or `exclude` matches nothing that could be patched.
    """
    survey = Survey(model)
    skip_inside = {id(m) for w in survey.modules.values() if isinstance(w, Wrapper) for m in w.modules() if m is not w}
    targets = []
    for module in survey.modules.values():
        if id(module) in skip_inside:
            continue
        name = survey.names[id(module)][0]
        if config.norm is not None:
            target = _norm_target(survey, name, module)
            if target is not None:
                target.names = survey.names[id(module)]
                targets.append(target)
    _apply_rules(targets, config)
    return targets


def _apply_rules(targets: list[Target], config: PatchConfig) -> None:
    for field_name in ("include", "exclude"):
        rule = getattr(config, field_name)
        if rule is None:
            continue
        for item in [rule] if isinstance(rule, str) else rule:
            probe = item if isinstance(rule, str) else [item]
            if not any(rule_matches(probe, name) for t in targets for name in t.names):
                names = [name for t in targets for name in t.names]
                raise NoMatchError(
                    f"rule {field_name}={item!r} matches none of the model's {len(names)} "
                    f"candidates; {nearest(item, names) if names else 'there is no norm in it'}"
                )
    for target in targets:
        if config.include is not None and not any(rule_matches(config.include, n) for n in target.names):
            target.reason = "not matched by include"
        elif config.exclude is not None and any(rule_matches(config.exclude, n) for n in target.names):
            target.reason = "matched by exclude"


def _norm_target(survey: Survey, name: str, module: nn.Module) -> Target | None:
    """A Target where `module` is a norm or calls itself one, else None."""
    if isinstance(module, Wrapper):
        return Target(name, module, "norm", reason="already patched") if hasattr(module, "branch_names") else None
    called_norm = "norm" in type(module).__name__.lower()
    target = Target(name, module, "norm")
    if isinstance(module, _OTHER_NORMS) or (called_norm and _OTHER_NAMES.search(type(module).__name__)):
        target.reason = "not a per-token norm: it normalises over the batch, groups or space"
        return target
    own = [p for p in (*module._parameters.values(), *module._buffers.values()) if p is not None]
    if not called_norm and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        vectors = bool(own) and all(p.numel() in (1, max(q.numel() for q in own)) and p.ndim <= 4 for p in own)
        if module._modules or not vectors or max(own, key=torch.Tensor.numel).squeeze().ndim != 1:
            return None
    elif module._modules:
        if any(True for child in module.modules() if child is not module and child._parameters):
            return (
                None
                if any("norm" in type(c).__name__.lower() for c in module.children())
                else Target(name, module, "norm", reason="norm with children of its own")
            )
        target.reason = "norm with children of its own"
        return target
    target.reason = _structural_reason(survey, name, module, own)
    if target.reason is None:
        try:
            target.traits = measure(module)
        except NotANorm as error:
            if not called_norm:
                return None
            target.reason = str(error)
    return target


def _structural_reason(survey: Survey, name: str, module: nn.Module, own: list[torch.Tensor]) -> str | None:
    """Why a norm cannot be wrapped where it stands, or None."""
    required = [
        p
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    ]
    if len(required) > 1:
        return f"its forward takes more than one argument ({', '.join(p.name for p in required)})"
    if not own and getattr(module, "normalized_shape", None) is None:
        return "norm of unknown width (no parameter and no normalized_shape)"
    if any(not p.is_floating_point() for p in own):
        return "integer weight"
    if survey.shares_parameters(module):
        return "its parameters are tied to another module's"
    if id(module) in survey.held_outside:
        return "also held outside the module tree (a list or plain attribute), where a swap does not reach"
    for one_name in survey.names[id(module)]:
        for ancestor, path in survey.ancestors(one_name):
            if isinstance(ancestor, _FUSED_PARENTS):
                return f"inside {type(ancestor).__name__}, whose fused path reads its weight directly"
            if is_read(path, direct_reads(type(ancestor))):
                return f"{type(ancestor).__name__}.forward reads its weight directly"
    return None


def is_causal(survey: Survey, name: str) -> bool:
    """Whether the module at `name` sits in a causal decoder, where no token may see a later one.

    The nearest ancestor that holds attention with a declared direction (`is_causal`, `is_decoder`) decides; models
    without such flags (state space models) are causal if transformers knows them as causal language models only.
    """
    for ancestor, _ in [(survey.dotted[name], ()), *survey.ancestors(name)]:
        flags = [
            bool(vars(m)[flag]) for m in ancestor.modules() for flag in ("is_causal", "is_decoder") if flag in vars(m)
        ]
        if flags:
            return any(flags)
    config = getattr(survey.model, "config", None)
    if getattr(config, "is_decoder", False):
        return True
    kind = getattr(config, "model_type", None)
    if kind is None:
        return False
    from transformers.models.auto import modeling_auto as auto

    return (
        kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not getattr(config, "is_encoder_decoder", False)
    )
