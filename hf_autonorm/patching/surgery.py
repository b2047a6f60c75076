"""The verbs that change a model: `plan`, `patch`, `unpatch`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import PatchConfig, in_range
from ..errors import ConfigError, NoMatchError, NotPatchedError, UnsupportedError
from ..nn.branches import BRANCHES
from ..nn.wrapper import outside_inference_mode
from ..tables import AsTable, pattern
from .build import build, describe
from .masks import connect_masks
from .record import require_module, update_record, wrappers
from .renaming import mark_renamed
from .survey import Survey, Target
from .targets import find_targets, is_causal


class _Unset:
    def __repr__(self) -> str:
        return "<as in config>"


_UNSET: Any = _Unset()


@dataclass(frozen=True)
class PlanRow:
    """One module of a plan."""

    name: str
    old_class: str
    new_class: str | None  # None where it is left alone
    added_parameters: int
    reason: str | None  # why it is left alone; None where it is patched


class Plan(AsTable, list):
    """Rows of `plan`; prints as a table."""

    @property
    def patched(self) -> list[PlanRow]:
        return [row for row in self if row.reason is None]

    @property
    def left_alone(self) -> list[PlanRow]:
        return [row for row in self if row.reason is not None]

    def table(self):
        """A `rich.table.Table`, one line for the modules of repeated blocks that fare alike."""
        from rich.table import Table
        from rich.text import Text

        added = sum(row.added_parameters for row in self)
        table = Table(
            title=f"{len(self.patched)} modules to patch, {len(self.left_alone)} left alone, {added:,} new parameters"
        )
        for column in ("module", "how many", "becomes", "parameters"):
            right = column in ("how many", "parameters")
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        groups: dict[tuple[Any, ...], list[PlanRow]] = {}
        for row in self:
            groups.setdefault((pattern(row.name), row.old_class, row.new_class, row.reason), []).append(row)
        for (modules, old, new, reason), rows in groups.items():
            if reason is not None:
                becomes = Text(f"{old}, left alone: {reason}", style="dim")
            else:
                becomes = Text(new if f"({old} " in new else f"{old} → {new}")
            parameters = f"{sum(row.added_parameters for row in rows):,}" if reason is None else ""
            name = modules if len(rows) > 1 else rows[0].name or modules
            table.add_row(Text(name), str(len(rows)), becomes, parameters)
        return table


def resolve_config(
    norm: str | None = _UNSET,
    linear: str | None = _UNSET,
    conv: str | None = _UNSET,
    config: PatchConfig | None = None,
    **fields: Any,
) -> PatchConfig:
    """One PatchConfig from the arguments of `patch`: `config` (or the defaults) with what is named beside it."""
    if config is not None and not isinstance(config, PatchConfig):
        raise ConfigError(f"config={config!r} must be a PatchConfig; PatchConfig.from_dict takes a dictionary")
    given = {k: v for k, v in {"norm": norm, "linear": linear, "conv": conv}.items() if v is not _UNSET}
    return (config or PatchConfig()).replace(**given, **fields)


def plan(
    model: nn.Module,
    norm: str | None = _UNSET,
    linear: str | None = _UNSET,
    conv: str | None = _UNSET,
    *,
    config: PatchConfig | None = None,
    example_inputs: Any = None,
    **fields: Any,
) -> Plan:
    """What `patch` with the same arguments would do; changes nothing.

    Returns rows (name, old_class, new_class, added_parameters, reason) that print as a table.
    """
    config = resolve_config(norm, linear, conv, config, **fields)
    survey, targets = _targets(model, config, example_inputs)
    rows = Plan()
    for target in targets:
        added, new_class = 0, None
        if target.reason is None:
            with torch.device("meta"):
                wrapper = build(survey, target, config, device=torch.device("meta"))
            added, new_class = sum(p.numel() for p in wrapper.new_parameters()), describe(wrapper)
        rows.append(PlanRow(target.name, type(target.module).__name__, new_class, added, target.reason))
    return rows


@outside_inference_mode
def patch(
    model: nn.Module,
    norm: str | None = _UNSET,
    linear: str | None = _UNSET,
    conv: str | None = _UNSET,
    *,
    config: PatchConfig | None = None,
    calibrate: Iterable[Any] | None = None,
    example_inputs: Any = None,
    **fields: Any,
) -> nn.Module:
    """Patches `model` in place and returns it (a bare target module comes back wrapped).

        model = patch(AutoModel.from_pretrained(name))                       # norms → AutoNorm
        model = patch(model, norm="dyt", include=r"encoder\\..*", calibrate=batches)
        model = patch(model, norm=None, linear="affine_like", strength=0.0)

    Args:
        model: any `nn.Module`: a transformers or timm model, or one of your own.
        norm: "autonorm" (default), the name of a branch, which then replaces the norm, or None.
        linear: "affine_like", "norm_like", or None (default).
        conv: the same for convolutions (PatchNorm).
        config: a PatchConfig; the other arguments change single fields of it.
        calibrate: batches to fit the patch on, see `calibrate`.
        example_inputs: one batch, as for `calibrate`, to run through the model first: what it shows to be
            bypassed is left alone too. The source of the model's classes is read in any case.
        fields: further fields of PatchConfig.

    Kept as they were: dtype, device, `training`, `requires_grad`, hooks, shared modules, tied weights, the random
    state. A module that would not be called, or not be right, is left alone; `plan` prints the reason. Called again,
    it patches what is still unpatched.

    PEFT goes on top: patch, save, then LoRA. A linear layer that is patched itself is targeted by the layer inside it,
    `target_modules=["query.original"]` (or "all-linear"); PEFT refuses the wrapper, around which a merge would be
    wrong. Norms named in `modules_to_save` go on training their gates.

    Raises:
        ConfigError: a setting is unknown or out of range.
        NoMatchError: a rule matches nothing in this model.
        UnsupportedError: a setting that this model cannot take (a sequence gate on a causal decoder).

    All of them are raised before anything is changed.
    """
    config = resolve_config(norm, linear, conv, config, **fields)
    survey, targets = _targets(model, config, example_inputs)
    wanted = [t for t in targets if t.reason is None]
    if not wanted:
        done = [t.module for t in targets if t.reason == "already patched"]
        if done and all(getattr(module, "patch_config", config) == config for module in done):
            return model
        if done:
            raise NoMatchError(
                f"all {len(done)} candidates are already patched, with other settings; call unpatch(model) first, or "
                "set_strength(model, …) to change the strength alone"
            )
        raise NoMatchError(_nothing_to_patch(config, targets))
    if hasattr(model, "peft_config"):
        warnings.warn(
            "the model carries a PEFT adapter: PEFT saves the adapter alone, without this patch. Patch before PEFT, "
            "or save after merge_and_unload()",
            stacklevel=3,
        )
    order = 1 + max((getattr(wrapper, "patch_order", 0) for _, wrapper in wrappers(model)), default=0)
    built = [(target, build(survey, target, config, order)) for target in wanted]
    result = survey.swap({id(target.module): wrapper for target, wrapper in built})
    try:
        connect_masks(result)
        update_record(result)
        if calibrate is not None:
            from .calibrate import calibrate as fit

            fit(result, calibrate)
    except BaseException:  # nothing half-patched, an interrupt included
        Survey(result).swap({id(wrapper): wrapper.original for _, wrapper in built})
        connect_masks(model)
        update_record(model)
        raise
    return result


def unpatch(model: nn.Module) -> nn.Module:
    """Takes every original out again, the same objects; the model saves and loads as a stock one after it.

    Returns the model (or the original, where the model itself was wrapped).
    """
    found = wrappers(model)
    if not found:
        raise NotPatchedError(f"{type(model).__name__} holds no patched module; there is nothing to undo")
    while found:  # a wrapper may sit inside another
        model = Survey(model).swap({id(w): w.original for _, w in found})
        found = wrappers(model)
    connect_masks(model)
    update_record(model)
    return model


def set_strength(model: nn.Module, strength: float) -> nn.Module:
    """Sets λ of every wrapper: 0 is the original bit for bit, 1 the paper's formula. Returns the model."""
    in_range("strength", strength, 0.0, 1.0)
    found = wrappers(model)
    if not found:
        raise NotPatchedError(f"{type(model).__name__} holds no patched module; call patch(model) first")
    for _, wrapper in found:
        wrapper.set_scalar("strength", strength)
    return model


def rebuild(model: nn.Module, entries: list[tuple[PatchConfig, list[str]]]) -> nn.Module:
    """Wraps exactly the named modules: the skeleton of a saved model, before its weights are loaded."""
    survey = Survey(model)
    swaps = {}
    for order, (config, names) in enumerate(entries):
        candidates = {
            name: target
            for target in find_targets(model, config.replace(include=None, exclude=None), skeleton=True)
            for name in target.names
        }
        for name in names:
            target = candidates[name]
            swaps[id(target.module)] = build(survey, target, config, order)
    model = survey.swap(swaps)
    connect_masks(model)
    return model


def _targets(model: nn.Module, config: PatchConfig, example_inputs: Any = None) -> tuple[Survey, list[Target]]:
    """The survey and the targets of a model that may be patched with this config at all."""
    require_module(model)
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError("the model is compiled; patch it first, then call torch.compile")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UnsupportedError(f"the model is wrapped in {type(model).__name__}; patch the model first, then wrap it")
    if config.norm is None and config.linear is None and config.conv is None:
        raise ConfigError("norm, linear and conv are all None: there is nothing to patch; e.g. norm='autonorm'")
    survey, targets = Survey(model), find_targets(model, config)
    for kind in ("linear", "conv"):
        if getattr(config, kind) is not None and not any(t.kind == kind for t in targets):
            raise NoMatchError(
                f"rule {kind}={getattr(config, kind)!r} matches nothing: {type(model).__name__} holds no "
                f"{'linear layer' if kind == 'linear' else 'convolution'}; leave {kind}= out"
            )
    mark_renamed(model, targets)
    _refuse_pooling_on_causal(survey, targets, config)
    if example_inputs is not None:
        from .probe import mark_bypassed

        mark_bypassed(model, targets, example_inputs)
    return survey, targets


def _refuse_pooling_on_causal(survey: Survey, targets: list[Target], config: PatchConfig) -> None:
    gate = config.norm_gate()
    pooling = [name for name in config.norm_branches() if BRANCHES[name].pools_sequence] if config.norm else []
    by_gate = gate.granularity == "sequence" and gate.kind not in ("fixed", "random")
    if not (config.norm and (by_gate or pooling)):
        return
    for target in targets:
        if target.kind == "norm" and target.reason is None and is_causal(survey, target.name):
            what = "gate granularity='sequence'" if by_gate else f"branch {pooling[0]!r}"
            remedy = (
                "use granularity='token' or 'layer'" if by_gate else "use a branch that looks at one token, e.g. 'dyt'"
            )
            raise UnsupportedError(
                f"{what} pools the whole sequence, and {target.name!r} is in a causal decoder, where a token would "
                f"see later ones; {remedy}"
            )


def _nothing_to_patch(config: PatchConfig, targets: list[Target]) -> str:
    rules = ", ".join(
        f"{k}={getattr(config, k)!r}"
        for k in ("norm", "linear", "conv", "include", "exclude")
        if getattr(config, k) is not None
    )
    if not targets:
        return (
            f"{rules}: nothing to patch, found no candidate (no LayerNorm, no RMSNorm, nothing like them); "
            "linear='affine_like' or conv='affine_like' patch other layers"
        )
    reasons = "; ".join(sorted({t.reason for t in targets if t.reason}))
    found = f"found {len(targets)} candidate{'s' * (len(targets) > 1)}, all left alone: {reasons}"
    return f"{rules}: nothing to patch, {found}. plan(model) lists them"


__all__ = ["Plan", "PlanRow", "patch", "plan", "rebuild", "resolve_config", "set_strength", "unpatch"]
