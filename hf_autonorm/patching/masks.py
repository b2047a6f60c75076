"""The way of an attention mask from a model's forward to the layers that pool a sequence."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..nn.autonorm import AutoNorm, MaskHolder
from .record import wrappers


def connect_masks(model: nn.Module) -> None:
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
