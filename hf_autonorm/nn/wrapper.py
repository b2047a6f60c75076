"""The one idea of this package: a patch wraps the original module, which stays inside, untouched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from .offload import execution_device

_UNPATCHED = "is a weight of an unpatched model: load its weights first, then patch; or unpatch(model) before loading"


class _ZeroGradients(torch.autograd.Function):
    """y, unchanged to the bit, with zero gradients (instead of none) for `parameters`."""

    @staticmethod
    def forward(ctx, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return y.clone()  # a view would forbid the in-place additions that models do on a norm's output

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def with_zero_gradients(y: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """`y` bit for bit; parameters that play no part at this strength still receive a (zero) gradient.

    Without it DDP waits for gradients that never come, and the first step of a ramp from strength 0 fails.
    """
    wanted = [p for p in parameters if p.requires_grad]
    return _ZeroGradients.apply(y, *wanted) if wanted and torch.is_grad_enabled() else y


def outside_inference_mode(verb: Callable) -> Callable:
    """Decorator: what `verb` makes can be trained later, also where it is called inside `torch.inference_mode()`."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return verb(*args, **kwargs)
        with torch.inference_mode(False):
            return verb(*args, **kwargs)

    return run


def ordinary(x: Tensor) -> bool:
    """Whether x is a plain tensor in plain eager code, where an autograd function does what its formula does.

    Not so where code is traced or transformed (`torch.func`, forward mode), or a global hook is to see each module.
    """
    if is_traced() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or x.is_meta:
        return False
    hooks = (t for name, t in vars(torch_module).items() if name.startswith("_global_") and name.endswith("_hooks"))
    return type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and not any(hooks)


def own_parameter(p: Tensor, x: Tensor) -> bool:
    """Whether p is a plain tensor (not quantised, cut up, …) where x is."""
    return type(p) in (Tensor, nn.Parameter) and p.device == x.device


def is_traced() -> bool:
    """Whether a compiler, `torch.export` or `torch.jit.trace` looks on: they want plain operations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def unhooked(module: nn.Module) -> bool:
    """Whether calling `module` runs its class's forward, and no hook sees what it computes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Autocast off for x's device; the meta device knows none."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class Fp32Buffers(nn.Module):
    """Keeps some buffers in fp32 where the rest of the module is cast: a strength of 0.3 is none in bfloat16."""

    def _fp32_buffers(self) -> tuple[str, ...]:
        """Their names."""
        return ()

    def _apply(self, fn, recurse: bool = True):
        kept = {name: self._buffers[name] for name in self._fp32_buffers()}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after.dtype != torch.float32:
                self._buffers[name] = before.to(device=after.device)
        return self


class Wrapper(Fp32Buffers):
    """Base of all layers here: `original` inside, `strength` λ from 0 (the original, bit for bit) to 1 (the formula).

    Scalars (`strength` and what a subclass adds by `_add_scalar`) are persistent fp32 buffers of shape `(1,)`; they
    stay fp32 under `.half()`. Data attributes of the original (`weight`, `bias`, `eps`, `in_features`, …) are read
    and assigned through the wrapper; its methods and modules are not (a visible `base_layer` would let PEFT merge the
    wrapper away).
    """

    def __init__(self, original: nn.Module, strength: float = 1.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.original = original
        self.training = original.training
        self._scalars: tuple[str, ...] = ()
        self._seen: dict[str, tuple[Tensor, int | None]] = {}
        self._values: dict[str, float] = {}
        self._is_zero = self._is_one = False
        self._add_scalar("strength", strength, device)

    # --- scalar state -------------------------------------------------------------------------------------------
    # The tensors are the truth (they are saved, broadcast and averaged). Python keeps a copy of their values, so that
    # forward can branch without waiting for the device and a compiled graph specialises on the phase alone. The copy
    # is refreshed when a tensor was replaced or written in place; an untouched layer changes no attribute in forward.

    def _add_scalar(self, name: str, value: float, device: torch.device | None = None) -> None:
        device = device or execution_device(self.original)
        self.register_buffer(name, torch.full((1,), float(value), dtype=torch.float32, device=device))
        self._scalars += (name,)
        # As rounded to fp32: a reloaded layer reads it off the tensor and must compute the same bits.
        self._values[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu").item()
        self._remember(name)
        self._on_scalars()

    def _remember(self, name: str) -> None:
        tensor = self._buffers[name]
        self._seen[name] = (tensor, 0 if tensor.is_inference() else tensor._version)

    def _sync_scalars(self) -> None:
        """Takes the values over from tensors that changed since the last call; a no-op in traced code."""
        if torch.compiler.is_compiling():
            return
        changed = False
        for name in self._scalars:
            tensor, (seen, version) = self._buffers[name], self._seen[name]
            if tensor is not seen or version is None or (not tensor.is_inference() and tensor._version != version):
                if not tensor.is_meta:
                    self._values[name] = float(tensor)
                self._remember(name)
                changed = True
        if changed:
            self._on_scalars()

    def _on_scalars(self) -> None:
        """Derives the phase flags that forward branches on."""
        self._is_zero = self._values["strength"] == 0
        self._is_one = self._values["strength"] == 1

    @torch.no_grad()
    def set_scalar(self, name: str, value: float) -> None:
        """Writes a scalar buffer in place; the way that `torch.compile`d code sees."""
        self._buffers[name].fill_(value)
        self._forget(name)
        self._sync_scalars()

    def _forget(self, *names: str) -> None:
        """Has these read again: a tensor made in inference mode keeps no count of its changes."""
        for name in names:
            self._seen[name] = (self._buffers[name], None)

    def scalar(self, name: str) -> float:
        """The present value of a scalar buffer, as a Python float."""
        self._sync_scalars()
        return self._values[name]

    def _lambda(self) -> float | Tensor:
        """λ for arithmetic: a Python number in eager code (DDP overwrites buffers between forward and backward), the
        tensor in traced code (a number would be baked in, one compilation per value)."""
        return self.strength if torch.compiler.is_compiling() else self._values["strength"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget(*self._scalars)
        self._sync_scalars()
        error_msgs, own = rest[-1], prefix + "original."
        names = [prefix + name for name in self.original._parameters if prefix + name in state_dict]
        if names and not any(key.startswith(own) for key in state_dict) and _UNPATCHED not in str(error_msgs):
            error_msgs.append(f"{names[0]} {_UNPATCHED}")

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._sync_scalars()
        return self

    def _fp32_buffers(self) -> tuple[str, ...]:
        return self._scalars

    # --- the original shines through -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_modules", {}).get("original")
            if original is None or name.startswith("_"):
                raise
            value = getattr(original, name)
            if not _is_data(value):
                raise AttributeError(
                    f"{type(self).__name__!r} forwards data only; for {name!r} use `.original.{name}`"
                ) from None
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_modules", {}).get("original")
        own = original is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        own = own or any(name in self.__dict__[table] for table in ("_parameters", "_buffers", "_modules"))
        if not own and hasattr(original, name) and _is_data(getattr(original, name)):
            setattr(original, name, value)
        else:
            super().__setattr__(name, value)

    def _call_original(self, x: Tensor | None, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """(the input tensor, a function that runs the original on it the way the caller called the wrapper)."""
        if x is not None and not kwargs:
            return x, self.original
        if x is None and len(kwargs) == 1:
            ((name, x),) = kwargs.items()
            return x, lambda value: self.original(**{name: value})
        raise TypeError(
            f"{type(self).__name__} around {type(self.original).__name__} takes one tensor; got "
            f"{'one positional argument and ' if x is not None else ''}the keywords {sorted(kwargs)}"
        )

    def new_parameters(self) -> list[nn.Parameter]:
        """The parameters the patch added (the original's own are not among them)."""
        inside = {id(p) for p in self.original.parameters()}
        return [p for p in self.parameters() if id(p) not in inside]

    def reset_parameters(self) -> None:
        """Sets the added parameters to their start; nothing to do where a layer adds none."""


def _is_data(value: Any) -> bool:
    return not isinstance(value, nn.Module) and not callable(value)
