"""What a forward on example inputs shows: targets whose weight is used while their forward is not called.

The source of a model tells most of it (`reads.py`); a run tells the rest, a weight that a kernel reads, say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .batches import forward
from .calibrate import main_output, undisturbed
from .survey import Target


def mark_bypassed(model: nn.Module, targets: list[Target], example_inputs: Any) -> None:
    """Sets the reason of every target that the examples show to be bypassed.

    Costs two forwards and a backward in eval mode: fused paths differ with and without gradients. A target that the
    examples do not reach at all is left as it is. Gradients and the random state are as before afterwards.
    """
    wanted = {target.module: target for target in targets if target.reason is None}
    kept = {p: p.grad for p in model.parameters()}
    with undisturbed(model), _counting(wanted) as called:
        try:
            with torch.no_grad():
                forward(model, example_inputs)
            plain = set(called)
            called.clear()
            for p in kept:
                p.grad = None
            with torch.enable_grad():
                output = main_output(forward(model, example_inputs))
                if output is not None and output.requires_grad:
                    output.float().square().mean().backward()
            for module, target in wanted.items():
                used = any(p.grad is not None for p in module.parameters())
                if (module in called and module not in plain) or (used and module not in called):
                    target.reason = "bypassed on the example inputs: its weight is used, its forward is not called"
        finally:
            for p, grad in kept.items():
                p.grad = grad


@contextlib.contextmanager
def _counting(modules: dict[nn.Module, Target]) -> Iterator[set[nn.Module]]:
    """Collects the modules that are called. Not by hooks: any hook makes a fused path step aside."""
    called: set[nn.Module] = set()
    own = {module: vars(module).get("forward") for module in modules}

    def watch(module: nn.Module) -> None:
        inner = module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.add(module)
            return inner(*args, **kwargs)

        module.forward = counted

    for module in modules:
        watch(module)
    try:
        yield called
    finally:
        for module, before in own.items():
            del module.forward
            if before is not None:
                module.forward = before
