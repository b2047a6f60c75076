"""The rows that need a GPU, in one script: correctness, no synchronisation, CUDA graphs, then times.

python -m benchmarks.cuda [--seconds 90] [--output runs/bench_cuda]

Ends with the budgets and writes `results.json`. Takes about three minutes, compilation included.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from hf_autonorm.nn import AffineLike, AutoNorm, PatchNorm

from .layers import frozen, peers
from .peers import liger
from .report import table
from .timing import Section, forward_backward, with_fused

SHAPES = {"bf16": (torch.bfloat16, 16384, 4096), "fp32": (torch.float32, 16384, 4096)}


def candidates(width: int) -> dict[str, tuple[nn.Module, str]]:
    found = {
        "F.layer_norm": (nn.LayerNorm(width), "0"),
        **peers(width),
        "AutoNorm, eager": (AutoNorm(nn.LayerNorm(width)), "0"),
        "AutoNorm, fused": (AutoNorm(nn.LayerNorm(width)), "1"),
        "AutoNorm, frozen, fused": (frozen(AutoNorm(nn.LayerNorm(width))), "1"),
    }
    for name, layer in liger().items():
        found[name] = (layer(width), "0")
    return found


def measure_events(title: str, reference: str, work: dict[str, Callable[[], object]], seconds: float) -> Section:
    """As `timing.measure`, by CUDA events; between two samples a write of 256 MB empties the cache."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    section = Section(title, reference, {name: [] for name in work})
    for run in work.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while len(section.samples[reference]) < 5 or time.perf_counter() < end:
        for name, run in work.items():
            flush.zero_()
            pair[0].record()
            run()
            pair[1].record()
            torch.cuda.synchronize()
            section.samples[name].append(pair[0].elapsed_time(pair[1]) / 1e3)
    return section


def errors(width: int = 1000, tokens: int = 777) -> dict[str, float]:
    """‖out − ref‖/‖ref‖ of output and input gradient, against the same layer in fp64 on the CPU, without noise."""
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layer = frozen(AutoNorm(nn.LayerNorm(width))).to(dtype)
        x, grad = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
        ours = _answers(copy.deepcopy(layer).cuda(), x.cuda(), grad.cuda(), "1")
        references = _answers(copy.deepcopy(layer).double(), x.double(), grad.double(), "0")
        for what, a, b in zip(("output", "gradient"), ours, references):
            found[f"{name} {what}"] = ((a.double().cpu() - b).norm() / b.norm()).item()
    return found


def _answers(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, fused: str) -> tuple[torch.Tensor, torch.Tensor]:
    x.requires_grad_()
    y = with_fused(fused, lambda: layer(x))()
    y.backward(grad)
    return y.detach(), x.grad


def check_graphs() -> dict[str, str]:
    """Each layer under `set_sync_debug_mode("error")` and captured in a CUDA graph: "ok" or what went wrong."""
    layers = {
        "AutoNorm": (AutoNorm(nn.LayerNorm(256)), (64, 256)),
        "AffineLike": (AffineLike(nn.Linear(256, 256)), (64, 256)),
        "PatchNorm": (PatchNorm(nn.Conv2d(8, 8, 3)), (4, 8, 16, 16)),
    }
    found = {}
    for name, (layer, shape) in layers.items():
        layer.cuda().eval()
        x = torch.randn(shape, device="cuda")
        try:
            with torch.no_grad():
                expected = layer(x)
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        layer(x)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                layer(x)
                torch.cuda.set_sync_debug_mode("default")
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = layer(x)
                graph.replay()
                torch.cuda.synchronize()
            torch.testing.assert_close(y, expected)
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="of timing, compilation apart")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_cuda"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: python -m benchmarks measures the rows of a CPU")
    console, sections = Console(width=120), {}
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    facts |= {"errors": errors(), "no synchronisation, CUDA graph": check_graphs()}
    console.print(facts)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, (dtype, tokens, width) in SHAPES.items():
        x, grad = (torch.randn(tokens, width, device="cuda", dtype=dtype) for _ in range(2))
        work = {
            key: with_fused(fused, forward_backward(layer.to("cuda", dtype).train(), x, grad))
            for key, (layer, fused) in candidates(width).items()
        }
        title = f"forward + backward, {tokens} × {width}, {name}"
        sections[name] = measure_events(title, "F.layer_norm", work, args.seconds / len(SHAPES))
        console.print(table(sections[name]))
        for to, limit in (("F.layer_norm", 1.5), ("Liger DyT", 1.1)):
            if to in work:
                value = sections[name].ratio("AutoNorm, fused", to).value
                verdict = "" if name != "bf16" else f" (budget {limit}: {'met' if value <= limit else 'missed'})"
                console.print(f"{name}: AutoNorm fused is {value:.2f} × {to}{verdict}")
        samples = {key: section.samples for key, section in sections.items()}
        (args.output / "results.json").write_text(json.dumps({**facts, "seconds": samples}, indent=1))


if __name__ == "__main__":
    main()
