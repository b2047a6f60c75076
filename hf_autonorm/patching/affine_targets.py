"""What in a model is a linear layer or a convolution that can be wrapped, and why one is left alone."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin

from ..nn.affine import Correction
from ..nn.patchnorm import PatchNorm, innermost
from ..nn.wrapper import Wrapper
from .heads import TASK_HEAD
from .survey import Survey, Target, structural_reason

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def linear_target(survey: Survey, name: str, module: nn.Module, *, heads: bool = False) -> Target | None:
    """A Target where `module` is a linear layer, whatever its class, or a PEFT layer around one; else None."""
    if isinstance(module, Wrapper):
        patched = isinstance(module, Correction) and not isinstance(module, PatchNorm)
        return Target(name, module, "linear", reason="already patched") if patched else None
    inner = innermost(module) if is_peft_layer(module) else module
    if not _is_linear(inner):
        return None
    target = Target(name, module, "linear")
    own_contract = None
    if not has_linear_forward(inner):
        own_contract = f"{type(inner).__name__} has a forward of its own, which may do more than W x + b"
    target.reason = _reason(survey, name, module, inner, own_contract, heads)
    return target


def conv_target(survey: Survey, name: str, module: nn.Module, *, heads: bool = False) -> Target | None:
    """A Target where `module` is a convolution or a PEFT layer around one; else None."""
    if isinstance(module, Wrapper):
        return Target(name, module, "conv", reason="already patched") if isinstance(module, PatchNorm) else None
    inner = innermost(module) if is_peft_layer(module) else module
    if not isinstance(inner, _ConvNd):
        return None
    target = Target(name, module, "conv")
    own_contract = None
    if isinstance(inner, _ConvTransposeNd):
        own_contract = "transposed convolution: an output is a sum over several patches"
    elif not has_conv_forward(inner):
        own_contract = f"{type(inner).__name__} has a forward of its own, which may do more than W x_p + b"
    target.reason = _reason(survey, name, module, inner, own_contract, heads)
    return target


def is_peft_layer(module: nn.Module) -> bool:
    """Whether PEFT has put `module` around a layer of the model (LoRA and its kin: all linear in the input)."""
    library = sys.modules.get("peft.tuners.tuners_utils")
    return library is not None and isinstance(module, library.BaseTunerLayer) and "base_layer" in module._modules


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear layer whose weight is (in, out)."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and type(module) is library.Conv1D


def has_linear_forward(module: nn.Module) -> bool:
    """Whether `module` computes W x + b and no more: nn.Linear's own forward, or Conv1D."""
    return is_conv1d(module) or type(module).forward is nn.Linear.forward


def has_conv_forward(module: nn.Module) -> bool:
    """Whether `module` computes a convolution and no more, by the forward of nn.Conv1d, Conv2d or Conv3d."""
    cls = type(module)
    return any(cls.forward is c.forward and cls._conv_forward is c._conv_forward for c in _CONVS)


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    # Quantised and other layers of their own class: found, to say why they are left alone.
    sized = hasattr(module, "in_features") and hasattr(module, "out_features")
    return sized and "linear" in type(module).__name__.lower() and not is_peft_layer(module)


def _reason(
    survey: Survey, name: str, module: nn.Module, inner: nn.Module, own_contract: str | None, heads: bool
) -> str | None:
    own = [p for p in (*inner._parameters.values(), *inner._buffers.values()) if p is not None]
    if isinstance(inner, LazyModuleMixin):
        return "lazy: its size is unknown until the first forward"
    if any(not p.is_floating_point() or p.element_size() < 2 for p in own):
        return "quantised: its weight is integer or packed"
    # An exact parametrisation gives a new class with the old name in it, so this comes before the class's contract.
    if hasattr(inner, "parametrizations") or "weight" not in inner._parameters:
        return "parametrised weight: it is computed anew in each forward"
    if type(inner.weight) not in (torch.Tensor, nn.Parameter):
        return f"quantised or sharded: its weight is a {type(inner.weight).__name__}"
    if own_contract is not None:
        return own_contract
    for ancestor, _ in survey.ancestors(name):
        if is_peft_layer(ancestor):
            return "inside a PEFT layer, which is the target itself"
    head = survey.heads.get(id(module))
    if head is not None and not (heads and head == TASK_HEAD):
        return head
    if survey.shares_parameters(inner):
        return "its parameters are tied to another module's"
    return structural_reason(survey, name, module, own)
