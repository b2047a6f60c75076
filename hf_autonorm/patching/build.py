"""The wrapper for a target: what a config makes of one module."""

from __future__ import annotations

import zlib

import torch

from ..config import PatchConfig
from ..nn.affine import AffineLike, Correction, NormLike
from ..nn.autonorm import AutoNorm
from ..nn.offload import execution_device
from ..nn.patchnorm import PatchNorm
from ..nn.wrapper import Wrapper
from .record import watch
from .survey import Survey, Target


def build(
    survey: Survey, target: Target, config: PatchConfig, order: int = 0, device: torch.device | None = None
) -> Wrapper:
    """The wrapper for one target of the `order`-th call of `patch`; reads the model, changes nothing."""
    wrapper = (
        _build_correction(target, config) if target.kind != "norm" else _build_norm(survey, target, config, device)
    )
    wrapper.patch_config, wrapper.patch_order = config, order
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


def describe(wrapper: Wrapper) -> str:
    if isinstance(wrapper, AutoNorm):
        if wrapper.replaces:
            return wrapper.branch_names[0]
        return f"AutoNorm({type(wrapper.original).__name__} | {' | '.join(wrapper.branch_names)})"
    if isinstance(wrapper, PatchNorm):
        return f"PatchNorm({wrapper.form})"
    return type(wrapper).__name__
