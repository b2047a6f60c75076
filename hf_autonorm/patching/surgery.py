"""The verbs that change a model: `plan`, `patch`, `unpatch`."""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import PatchConfig, in_range
from ..errors import ConfigError, NoMatchError, NotPatchedError, UnsupportedError
from ..nn.affine import AffineLike, Correction, NormLike
from ..nn.autonorm import AutoNorm, MaskHolder
from ..nn.branches import BRANCHES
from ..nn.offload import execution_device
from ..nn.patchnorm import PatchNorm
from ..nn.wrapper import Wrapper, outside_inference_mode
from ..tables import AsTable
from .record import require_module, update_record, watch, wrappers
from .renaming import mark_renamed
from .survey import Survey, Target
from .targets import find_targets, is_causal

_UNSET: Any = object()


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
        """A `rich.table.Table`."""
        from rich.table import Table
        from rich.text import Text

        added = sum(row.added_parameters for row in self)
        table = Table(
            title=f"{len(self.patched)} modules to patch, {len(self.left_alone)} left alone, {added:,} new parameters"
        )
        for column in ("module", "class", "becomes", "new parameters"):
            table.add_column(column, justify="right" if column == "new parameters" else "left", overflow="fold")
        for row in self:
            new = row.new_class if row.reason is None else Text(f"left alone: {row.reason}", style="dim")
            table.add_row(
                row.name or "(the model itself)",
                row.old_class,
                new,
                f"{row.added_parameters:,}" if row.reason is None else "",
            )
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
                wrapper = _build(survey, target, config, device=torch.device("meta"))
            added, new_class = sum(p.numel() for p in wrapper.new_parameters()), _describe(wrapper)
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
    built = [(target, _build(survey, target, config)) for target in wanted]
    result = _swap(survey, model, {id(target.module): wrapper for target, wrapper in built})
    try:
        _connect_masks(result)
        update_record(result)
        if calibrate is not None:
            from .calibrate import calibrate as fit

            fit(result, calibrate)
    except BaseException:  # nothing half-patched, an interrupt included
        _swap(Survey(result), result, {id(wrapper): wrapper.original for _, wrapper in built})
        _connect_masks(model)
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
        model = _swap(Survey(model), model, {id(w): w.original for _, w in found})
        found = wrappers(model)
    _connect_masks(model)
    update_record(model)
    return model


def set_strength(model: nn.Module, strength: float) -> None:
    """Sets λ of every wrapper: 0 is the original bit for bit, 1 the paper's formula."""
    in_range("strength", strength, 0.0, 1.0)
    found = wrappers(model)
    if not found:
        raise NotPatchedError(f"{type(model).__name__} holds no patched module; call patch(model) first")
    for _, wrapper in found:
        wrapper.set_scalar("strength", strength)


def rebuild(model: nn.Module, entries: list[tuple[PatchConfig, list[str]]]) -> nn.Module:
    """Wraps exactly the named modules: the skeleton of a saved model, before its weights are loaded."""
    survey = Survey(model)
    swaps = {}
    for config, names in entries:
        candidates = {
            name: target
            for target in find_targets(model, config.replace(include=None, exclude=None), skeleton=True)
            for name in target.names
        }
        for name in names:
            target = candidates[name]
            swaps[id(target.module)] = _build(survey, target, config)
    model = _swap(survey, model, swaps)
    _connect_masks(model)
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


def _build(survey: Survey, target: Target, config: PatchConfig, device: torch.device | None = None) -> Wrapper:
    """The wrapper for one target; reads the model, changes nothing."""
    wrapper = (
        _build_correction(target, config) if target.kind != "norm" else _build_norm(survey, target, config, device)
    )
    wrapper.patch_config = config
    wrapper.register_state_dict_pre_hook(watch)
    return wrapper


def _build_norm(survey: Survey, target: Target, config: PatchConfig, device: torch.device | None) -> AutoNorm:
    near_device, near_dtype = _placement(survey, target)
    # One number of 32 bits: torch's CPU generator reads no more.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {target.name}".encode()))
    return AutoNorm(
        target.module,
        config.norm_branches(),
        config.norm_gate(),
        strength=config.strength,
        alpha=config.dyt_alpha,
        traits=target.traits,
        generator=generator,
        fused=config.fused,
        device=device or near_device,
        dtype=near_dtype,
    )


def _build_correction(target: Target, config: PatchConfig) -> Correction:
    if target.kind == "conv":
        return PatchNorm(target.module, config.conv, strength=config.strength)
    layer = AffineLike if config.linear == "affine_like" else NormLike
    return layer(target.module, strength=config.strength)


def _placement(survey: Survey, target: Target) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype for the new parameters: the norm's own, else those of the nearest parameters around it."""
    around = [target.module, *(ancestor for ancestor, _ in survey.ancestors(target.name))]
    for module in around:
        for p in module.parameters():
            if p.is_floating_point() and p.dtype.itemsize >= 2:
                return execution_device(target.module) or p.device, p.dtype
    return None, None


def _swap(survey: Survey, model: nn.Module, swaps: dict[int, nn.Module]) -> nn.Module:
    """Puts the new modules in all places of the old ones, keeping order and sharing; returns the (new) root."""
    for key, new in swaps.items():
        for parent, attribute in survey.parents.get(key, []):
            parent._modules[attribute] = new
    return swaps.get(id(model), model)


def _connect_masks(model: nn.Module) -> None:
    """Gives every layer that pools a sequence the attention mask of the model it sits in; takes stale hooks away.

    The hooks go on each model that is called on its own (a `PreTrainedModel`, or the root), which knows the mask.
    """
    for module in model.modules():
        stale = [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, MaskHook)]
        for key in stale:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    pooling = [m for _, m in wrappers(model) if isinstance(m, AutoNorm) and m.pools_sequence]
    if not pooling:
        return
    holder = MaskHolder()
    for layer in pooling:
        layer.mask_holder = holder
    for module in model.modules():
        if module is model or (hasattr(module, "config") and hasattr(module, "base_model_prefix")):
            if any(isinstance(m, AutoNorm) and m.pools_sequence for m in module.modules()):
                module.register_forward_pre_hook(MaskHook(holder), with_kwargs=True)


class MaskHook:
    """The pre-hook that fills a MaskHolder from `attention_mask`, passed by name or by position."""

    def __init__(self, holder: MaskHolder) -> None:
        self.holder = holder

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None and len(args) > 1:
            names = list(inspect.signature(module.forward).parameters)
            if "attention_mask" in names and names.index("attention_mask") < len(args):
                mask = args[names.index("attention_mask")]
        self.holder.fill(mask)


def _describe(wrapper: Wrapper) -> str:
    if isinstance(wrapper, AutoNorm):
        if wrapper.replaces:
            return wrapper.branch_names[0]
        return f"AutoNorm({type(wrapper.original).__name__} | {' | '.join(wrapper.branch_names)})"
    if isinstance(wrapper, PatchNorm):
        return f"PatchNorm({wrapper.form})"
    return type(wrapper).__name__


__all__ = ["Plan", "PlanRow", "patch", "plan", "rebuild", "resolve_config", "set_strength", "unpatch"]
