"""What in a model is a norm (a linear, a convolution), and why one is left alone."""

from __future__ import annotations

import re

import torch
from torch import nn

from ..config import PatchConfig
from ..errors import NoMatchError, nearest
from ..nn.traits import NotANorm, measure
from ..nn.wrapper import Wrapper
from .affine_targets import conv_target, linear_target
from .following import keep_needed_norms
from .survey import Survey, Target, structural_reason

_OTHER_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, InstanceNorm, SyncBatchNorm
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
_OTHER_NAMES = re.compile(r"batch_?norm|group_?norm|instance_?norm|frozen_?batch|response_?norm|evonorm", re.I)


_GRAMMAR = (
    "A string is a regular expression for the whole dotted name ('.*mlp.*'), a list holds exact names or name "
    "suffixes (['mlp.fc1'])"
)


def rule_matches(rule: str | list[str], name: str) -> bool:
    """PEFT's grammar: a string is a regular expression for the whole dotted name, a list holds names or suffixes."""
    if isinstance(rule, str):
        return re.fullmatch(rule, name) is not None
    return any(name == item or name.endswith("." + item) for item in rule)


def find_targets(model: nn.Module, config: PatchConfig, *, skeleton: bool = False) -> list[Target]:
    """All modules the config's rules are about, in the model's order, each with the reason where it is left alone.

    skeleton: the weights are yet to be loaded; whatever values are there mean nothing.

    Raises NoMatchError where `include` or `exclude` matches nothing that could be patched.
    """
    survey = Survey(model)
    skip_inside = {id(m) for w in survey.modules.values() if isinstance(w, Wrapper) for m in w.modules() if m is not w}
    targets = []
    for module in survey.modules.values():
        if id(module) in skip_inside:
            continue
        name = survey.names[id(module)][0]
        target = _norm_target(survey, name, module, skeleton) if config.norm is not None else None
        if target is None and config.linear is not None:
            target = linear_target(survey, name, module, heads=config.heads)
        if target is None and config.conv is not None:
            target = conv_target(survey, name, module, heads=config.heads)
        if target is not None:
            target.names = survey.names[id(module)]
            targets.append(target)
    _apply_rules(targets, config)
    if config.norm == "identity":
        keep_needed_norms(survey, targets)
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
                    f"candidates; {nearest(item, names) if names else 'there is none in it'}. {_GRAMMAR}"
                )
    for target in targets:
        if config.include is not None and not any(rule_matches(config.include, n) for n in target.names):
            target.reason = "not matched by include"
        elif config.exclude is not None and any(rule_matches(config.exclude, n) for n in target.names):
            target.reason = "matched by exclude"


def _norm_target(survey: Survey, name: str, module: nn.Module, skeleton: bool) -> Target | None:
    """A Target where `module` is a norm or calls itself one, else None."""
    if isinstance(module, Wrapper):
        return Target(name, module, "norm", reason="already patched") if hasattr(module, "branch_names") else None
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):  # a thin one looks like a vector
        return None
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
    target.reason = structural_reason(survey, name, module, own)
    if target.reason is None and not own and getattr(module, "normalized_shape", None) is None:
        target.reason = "norm of unknown width (no parameter and no normalized_shape)"
    if target.reason is None or not called_norm:
        try:
            target.traits = measure(module, values=not skeleton)
        except NotANorm as error:
            if not called_norm:
                return None
            target.reason = str(error)
    return target


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
