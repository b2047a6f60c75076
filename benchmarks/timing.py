"""Times of several pieces of work beside each other, on a machine that does other things too.

All pieces run once a round, in another order each round, so that a busy moment meets all of them; what is compared is
the ratio within a round, and of those ratios the median.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

SHORTEST = 5e-3  # seconds; work that is over sooner is run several times for one sample
FUSED = "HF_AUTONORM_FUSED"  # environment variable of hf_autonorm: 1 compiled, 0 op by op, auto


@dataclass(frozen=True)
class Ratio:
    """The median over the rounds, and the interval that holds the true one at 95 %."""

    value: float
    low: float
    high: float


@dataclass
class Section:
    """What was measured in one interleaved run: seconds for each piece of work, one a round."""

    title: str
    reference: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def fastest(self, name: str) -> float:
        return min(self.samples[name])

    def ratio(self, name: str, to: str | None = None) -> Ratio:
        """Of `name` to another piece of the same run, by default the reference."""
        pairs = sorted(a / b for a, b in zip(self.samples[name], self.samples[to or self.reference]))
        n = len(pairs)
        first = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))  # order statistics of a binomial count
        return Ratio(statistics.median(pairs), pairs[first], pairs[n - 1 - first])


def measure(title: str, reference: str, work: dict[str, Callable[[], object]], seconds: float) -> Section:
    """Runs `work` in rounds for about `seconds`, three rounds at least, after one to warm up and one to size up."""
    repeats, spent = {}, 0.0
    for name, run in work.items():
        run()
        once = _seconds(run, 1)
        repeats[name] = max(1, min(1000, math.ceil(SHORTEST / max(once, 1e-7)))) if seconds else 1
        spent += repeats[name] * once
    rounds = max(3, min(200, int(seconds / spent)))
    section = Section(title, reference, {name: [] for name in work})
    names = list(work)
    with _no_collection():
        for number in range(rounds):
            shift = number % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 else reversed(order):
                section.samples[name].append(_seconds(work[name], repeats[name]))
    return section


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def with_fused(value: str, run: Callable[[], object]) -> Callable[[], object]:
    """`run` with hf_autonorm's layers compiled (1), op by op (0) or as they choose (auto)."""

    def switched() -> object:
        before = os.environ.get(FUSED)
        os.environ[FUSED] = value
        try:
            return run()
        finally:
            if before is None:
                del os.environ[FUSED]
            else:
                os.environ[FUSED] = before

    return switched


def forward(module: torch.nn.Module, *args: object, **kwargs: object) -> Callable[[], object]:
    """The forward pass as at inference."""

    def run() -> object:
        with torch.no_grad():
            return module(*args, **kwargs)

    return run


def forward_backward(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    """Forward and backward pass, the gradient of the input included."""
    x = x.detach().requires_grad_()

    def run() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(grad)

    return run
