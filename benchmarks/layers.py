"""Forward + backward of the layers, as ratios to `nn.LayerNorm` in one interleaved run.

python -m benchmarks.layers [--tokens 1576] [--width 768] [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from hf_autonorm import GateConfig
from hf_autonorm.nn import AffineLike, AutoNorm, DynamicTanh


def candidates(width: int) -> dict[str, nn.Module]:
    """The layers, each in training mode; the first is the reference."""
    fixed = GateConfig(kind="fixed", value=0.0)
    frozen = AutoNorm(nn.LayerNorm(width))
    frozen.freeze()
    return {
        "LayerNorm": nn.LayerNorm(width),
        "RMSNorm": nn.RMSNorm(width),
        "DynamicTanh": DynamicTanh(width),
        "AutoNorm, strength 0": AutoNorm(nn.LayerNorm(width), strength=0.0),
        "AutoNorm, gumbel/token": AutoNorm(nn.LayerNorm(width)),
        "AutoNorm, frozen": frozen,
        "AutoNorm, softmax/layer": AutoNorm(nn.LayerNorm(width), gate=GateConfig(kind="softmax", granularity="layer")),
        "AutoNorm, dyt alone": AutoNorm(nn.LayerNorm(width), gate=fixed),
        "Linear": nn.Linear(width, width),
        "AffineLike(Linear)": AffineLike(nn.Linear(width, width)),
    }


def interleaved(work: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turn so that a busy moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 2):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:  # the first rounds warm up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1576)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(8, args.tokens // 8, args.width, requires_grad=True)
    grad = torch.randn_like(x)

    def step(layer: nn.Module) -> Callable[[], None]:
        def run() -> None:
            layer.zero_grad(set_to_none=True)
            layer(x).backward(grad)

        return run

    seconds = interleaved({name: step(layer) for name, layer in candidates(args.width).items()}, args.repeats)
    reference = seconds["LayerNorm"]
    print(f"forward + backward, {x.shape[0] * x.shape[1]} × {args.width}, fp32, {torch.get_num_threads()} CPU threads")
    for name, value in seconds.items():
        print(f"{name:26s} {1e3 * value:9.2f} ms  {value / reference:7.2f} × LayerNorm")


if __name__ == "__main__":
    main()
