"""How long `patch` takes, by the size of the model: Llama configurations on the meta device, no weight anywhere.

python -m benchmarks.patching [--repeats 3]

CPU seconds of the process (another load on the machine hardly counts), the first call apart: it reads transformers'
conversion tables once. Ends with the exponent of the growth over the number of modules: 1 is linear.
"""

from __future__ import annotations

import argparse
import statistics
import time

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


def seconds(size: str, repeats: int, **rules) -> tuple[int, float]:
    """(number of modules, median CPU seconds). Every parameter must be the object it was, and on the meta device."""
    times = []
    for _ in range(repeats):
        model = llama(*SIZES[size])
        modules, before = sum(1 for _ in model.modules()), {id(p) for p in model.parameters()}
        start = time.process_time()
        patch(model, **rules)
        times.append(time.process_time() - start)
        assert before <= {id(p) for p in model.parameters()} and all(p.is_meta for p in model.parameters())
        del model
    return modules, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"first call of the process, 8 B, norms: {seconds('8 B', 1)[1]:.2f} s")
    for name, rules in {"norms": {}, "norms and linears": {"linear": "affine_like"}}.items():
        rows = [(size, *seconds(size, repeats, **rules)) for size in SIZES]
        for size, modules, taken in rows:
            print(f"{name:18s} Llama {size:>6s}  {modules:5d} modules  {taken:.2f} s")
        exponent = np.polyfit(np.log([row[1] for row in rows]), np.log([row[2] for row in rows]), 1)[0]
        print(f"{name:18s} grows with the number of modules to the power of {exponent:.2f}")


if __name__ == "__main__":
    main()
