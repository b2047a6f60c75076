"""Where a module's tensors are when accelerate keeps them elsewhere (`device_map`, `cpu_offload`, `disk_offload`).

Between calls an offloaded parameter is a meta tensor; a hook brings the real one for the time of the forward. The hook
is looked at by its attributes, so that this package's layers need torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _hooks(module: nn.Module) -> list:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def execution_device(module: nn.Module) -> torch.device | None:
    """The device `module` computes on; None where it has neither tensors nor a hook that says so."""
    for hook in _hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next((t.device for t in (*module.parameters(), *module.buffers())), None)


def real_tensor(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The values of the module's own tensor `name`: from where a hook keeps them, or `tensor` itself."""
    if tensor.is_meta:
        for hook in _hooks(module):
            try:
                return hook.weights_map[name]
            except (AttributeError, KeyError, TypeError):
                continue  # not an offloading hook, or this tensor is not offloaded
    return tensor
