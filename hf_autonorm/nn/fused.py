"""The functions of `functional.py` compiled by Inductor, once per process, kind of layer and width.

On a CPU either way of running them goes through blocks of tokens that fit the cache: one pass over memory instead of
several, and no temporary as large as x. On a GPU the compiled code is called once, on everything.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..config import FUSED
from ..errors import ConfigError
from .functional import EAGER, Engine, Form, Gradients, mix_backward, mix_forward

VARIABLE = "HF_AUTONORM_FUSED"
_SPELLINGS = {"1": "on", "0": "off", "": "auto"}
# Numbers in x from which the compiled code pays, by device; measured on a CPU, where a call costs about 0.1 ms more.
_PAYS_FROM = {"cpu": 1 << 18, "cuda": 1 << 16}
# Numbers of x in a block, per thread: compiled code holds x, its gradient and the result, op by op there are more.
_BLOCK = 3 << 17
_PLAIN_BLOCK = 1 << 16

_engines: dict[tuple, Engine] = {}
_lock = threading.Lock()
_numbers = itertools.count()
_log = logging.getLogger(__name__)


def fused_mode(setting: str) -> str:
    """auto, on or off: the environment variable HF_AUTONORM_FUSED (auto, 1 or on, 0 or off), else `setting`."""
    value = os.environ.get(VARIABLE, setting).lower()
    value = _SPELLINGS.get(value, value)
    if value not in FUSED:
        raise ConfigError(f"{VARIABLE}={os.environ[VARIABLE]!r} is unknown; set it to auto, 1 or 0")
    return value


def as_one_function(setting: str, x: Tensor) -> bool:
    """Whether AutoNorm is to run as one function on x: where compiled code pays, or the setting is not "auto".

    Elsewhere the layer's ordinary operations are faster than the function's, and what they keep is small.
    """
    return fused_mode(setting) != "auto" or x.numel() >= _PAYS_FROM.get(x.device.type, float("inf"))


def choose_engine(setting: str, form: Form, x: Tensor, mix: tuple[Tensor | None, ...]) -> Engine:
    """Compiled or, where that cannot be or is not wanted, op by op; for x (…, D) and the parameters of `mix_forward`.

    A function of the setting and the shape alone, so that a run that is broken off and resumed computes the same bits.
    """
    kind, rows = x.device.type, x.numel() // x.shape[-1]
    # Code that watches every operation shall see the operations; sizes 0 and 1 would be compiled for themselves.
    modes = _get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(type(mode) is not DeviceContext for mode in modes):
        return EAGER
    if fused_mode(setting) == "off" or rows < 2 or not _compiler(kind):
        return _unfused(x)
    wanted = torch.is_grad_enabled()
    # What is made in inference mode is another kind of tensor to Dynamo; it also compiles anew for these two.
    kinds = (x.dtype, x.device, torch.is_inference_mode_enabled(), *(None if p is None else p.dtype for p in mix))
    key = (wanted, form, x.shape[-1], *kinds, torch.get_num_threads(), len(modes))
    engine = _engines.get(key)
    if engine is None:
        with _lock:
            if key not in _engines:
                known = _engines.get((not wanted, *key[1:]))
                _engines[key] = _compile(form, x, mix, known, wanted)
            engine = _engines[key]
    return _unfused(x) if engine is EAGER else engine


def _unfused(x: Tensor) -> Engine:
    return EAGER if x.device.type != "cpu" or x.numel() <= 2 * _PLAIN_BLOCK else _IN_BLOCKS


@functools.cache
def _compiler(kind: str) -> bool:
    """Whether Inductor finds a compiler; says so, once, where it does not."""
    if kind != "cpu" or any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "cl") if name):
        return True
    warnings.warn(
        f"no C++ compiler (g++, clang++ or $CXX) found: AutoNorm layers run unfused, which is slower. Install one, or "
        f"set {VARIABLE}=0 to go without and without this line",
        stacklevel=2,
    )
    return False


def _compile(form: Form, x: Tensor, mix: tuple[Tensor | None, ...], known: Engine | None, backward: bool) -> Engine:
    """The compiled pair, run once on a few rows; op by op where that fails, with a warning."""
    if known is EAGER:
        return EAGER
    width = x.shape[-1]
    note = threading.Timer(1.0, _log.warning, [f"compiling AutoNorm for width {width}, once in this process …"])
    note.daemon = True
    note.start()
    start = time.perf_counter()
    try:
        if isinstance(known, _Blocks):
            blocks = known
        else:
            blocks = _Blocks(_compiled(_forward_into, x.device.type), _compiled(_backward_into, x.device.type))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            _first_run(blocks, form, x, [_bare(p) for p in mix], backward)
    except Exception as error:  # whatever the compiler dislikes, the model goes on
        text = f"AutoNorm layers of width {width} run unfused: compiling failed ({_first_line(error)})"
        warnings.warn(text, stacklevel=2)
        return EAGER
    finally:
        note.cancel()
    seconds = time.perf_counter() - start
    if seconds > 1:
        _log.warning(f"compiled AutoNorm for width {width} in {seconds:.0f} s")
    return blocks


def _first_run(blocks: _Blocks, form: Form, x: Tensor, mix: list[Tensor | None], backward: bool) -> None:
    """Compiles for any number of rows."""

    def rows(width: int, dtype: torch.dtype) -> Tensor:
        t = torch.zeros(8, width, dtype=dtype, device=x.device)
        torch._dynamo.mark_dynamic(t, 0)
        return t

    wide = mix[4].dtype
    columns = [None if form.centered is None else rows(1, wide) for _ in range(4)]
    columns[2] = columns[2] if form.centered else None
    out, inputs = rows(x.shape[-1], x.dtype), rows(x.shape[-1], x.dtype)
    blocks.forward_into(out, inputs, *columns[:2], *mix, form)
    if backward:
        blocks.backward_into(out, rows(x.shape[-1], x.dtype), inputs, *columns, *mix, form)


def _forward_into(out: Tensor, *args: Any) -> tuple[Tensor | None, Tensor | None]:
    y, mean, rstd = mix_forward(*args)
    out.copy_(y)
    return mean, rstd


def _backward_into(out: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    found = mix_backward(*args)
    out.copy_(found.x)
    return tuple(found[1:])


def _compiled(function: Callable, kind: str) -> Callable:
    # On a CPU the curve's value is worth keeping for the length of a block: three loops of the backward pass need it.
    options = {"realize_opcount_threshold": 16} if kind == "cpu" else None
    # Dynamo counts recompilations, and gives up after eight, per code object; each kind of layer gets its own.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = types.FunctionType(code, function.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True, options=options)


class _Blocks(Engine):
    """The two functions, block after block; each writes into its first argument what is as large as x."""

    def __init__(self, forward_into: Callable, backward_into: Callable, size: int | None = None) -> None:
        super().__init__(self._forward, self._backward)
        self.forward_into, self.backward_into, self.size = forward_into, backward_into, size
        self.given_up = False

    def _forward(self, x: Tensor, keep, move, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *mix, form = rest
        out, parts = self._run("forward_into", (x, keep, move), mix, form)
        mean, rstd = parts
        return out, _join(mean), _join(rstd)

    def _backward(self, grad: Tensor, x: Tensor, keep, move, mean, rstd, *rest: Any) -> Gradients:
        *mix, form = rest
        out, parts = self._run("backward_into", (grad, x, keep, move, mean, rstd), mix, form)
        keep, move, *vectors, slope, shift = parts
        return Gradients._make([out, _join(keep), _join(move), *map(_total, vectors), _join(slope), _join(shift)])

    def _call(self, name: str, *args: Any) -> tuple:
        """The function of that name; op by op from the first time on that Dynamo refuses to compile it once more."""
        if not self.given_up:
            try:
                return getattr(self, name)(*args)
            except Exception as error:
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                self.given_up = True
                warnings.warn(f"AutoNorm layers of width {args[0].shape[-1]} go on unfused: {_first_line(error)}")
        return getattr(_IN_BLOCKS, name)(*args)

    def _run(self, name: str, given: tuple[Tensor | None, ...], mix: list, form: Form) -> tuple[Tensor, list]:
        out = torch.empty(given[0].shape, dtype=given[0].dtype, device=given[0].device)
        # A change of strides or of `requires_grad` would be compiled for itself.
        each = [None if t is None else t.detach().expand(len(out), -1).contiguous() for t in given]
        mix = [_bare(p) for p in mix]
        count = 1
        if out.device.type == "cpu":
            size = (self.size or _BLOCK) * torch.get_num_threads()
            count = max(1, min(len(out) // 2, -(-out.numel() // size)))
        parts = []
        for i in range(count):
            start, end = i * len(out) // count, (i + 1) * len(out) // count  # none of a single row
            parts.append(self._call(name, *[None if t is None else t[start:end] for t in (out, *each)], *mix, form))
        return out, list(zip(*parts))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _bare(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


def _join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat(parts)


def _total(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.stack(parts).sum(0)


_IN_BLOCKS = _Blocks(_forward_into, _backward_into, _PLAIN_BLOCK)
