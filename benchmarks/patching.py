"""How long `patch` takes, by the size of the model: Llama configurations on the meta device, no weight anywhere.

CPU seconds of the process (another load on the machine hardly counts), the first call apart: it reads transformers'
conversion tables once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hf_autonorm import patch

# (layers, width, inner width, heads, key-value heads): Llama 3.2 1B, 3 8B, 3 70B, 3.1 405B
SIZES = {
    "1 B": (16, 2048, 8192, 32, 8),
    "8 B": (32, 4096, 14336, 32, 8),
    "70 B": (80, 8192, 28672, 64, 8),
    "405 B": (126, 16384, 53248, 128, 8),
}
RULES = {"norms": {}, "norms and linears": {"linear": "affine_like"}}


@dataclass(frozen=True)
class PatchTimes:
    """Median CPU seconds of `patch` for each size, and the seconds of the first call of the process (8 B, norms)."""

    title: str
    first: float
    modules: dict[str, int]
    seconds: dict[str, dict[str, float]]  # rule → size → seconds

    def exponent(self, rule: str) -> float:
        """Of the growth over the number of modules: 1 is linear."""
        sizes = list(self.modules)
        counts, seconds = [self.modules[s] for s in sizes], [self.seconds[rule][s] for s in sizes]
        return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])


def llama(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=128_256,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def once(size: str, **rules: str) -> tuple[int, float]:
    """(number of modules, CPU seconds). Every parameter must be the object it was, and on the meta device."""
    model = llama(*SIZES[size])
    modules, before = sum(1 for _ in model.modules()), {id(p) for p in model.parameters()}
    start = time.process_time()
    patch(model, **rules)
    taken = time.process_time() - start
    assert before <= {id(p) for p in model.parameters()} and all(p.is_meta for p in model.parameters())
    return modules, taken


def run(seconds: float, sizes: tuple[str, ...] = tuple(SIZES), repeats: int = 3) -> dict[str, PatchTimes]:
    """`seconds` is not read: `repeats` of each, in turn."""
    first = once("8 B" if "8 B" in sizes else sizes[0])[1]
    modules: dict[str, int] = {}
    taken: dict[str, dict[str, list[float]]] = {rule: {size: [] for size in sizes} for rule in RULES}
    for _ in range(repeats):
        for rule, fields in RULES.items():
            for size in sizes:
                modules[size], value = once(size, **fields)
                taken[rule][size].append(value)
    medians = {rule: {size: statistics.median(values) for size, values in row.items()} for rule, row in taken.items()}
    return {"patch time": PatchTimes("patch, Llama configurations on the meta device", first, modules, medians)}
