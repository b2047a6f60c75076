"""What the library promises about its own cost, and whether a run keeps it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from .models import FOLDED, encoder, is_the_same, variants


@dataclass(frozen=True)
class Verdict:
    """One budget: `measured` is None where this run did not measure it, and `note` says why or how sure it is."""

    work: str
    limit: float
    unit: str
    measured: float | None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """To the two digits that the table shows."""
        return None if self.measured is None else round(self.measured, 2) <= self.limit


# work, name of the section, row, what it is compared with (None: the section's reference), limit
_RATIOS = (
    ("AutoNorm fused, token gate, forward + backward, of an eager DyT", "norm layers, forward + backward")
    + ("AutoNorm, fused", "DyT", 0.80),
    ("AutoNorm fused, token gate, forward + backward, of naive AutoNorm", "norm layers, forward + backward")
    + ("AutoNorm, fused", "naive AutoNorm", 0.40),
    ("MiniLM-size, batch 16×64, inference, of unpatched", "MiniLM, inference", "AutoNorm", None, 1.05),
    ("MiniLM-size, batch 16×64, training step, of unpatched", "MiniLM, training step", "AutoNorm", None, 1.08),
    ("AffineLike linear, forward, of the linear", "linears, forward", "AffineLike", None, 1.03),
    ("PatchNorm conv 3×3 64→64, forward, of the conv", "convolutions, forward")
    + ("PatchNorm, affine-like", None, 1.15),
)


def folds_to_stock() -> bool:
    """Whether a model folded to its originals has the classes and the state dict of one that was never patched."""
    torch.manual_seed(0)
    model = encoder(1, 32, 2, 64)
    return is_the_same(copy.deepcopy(model), variants(model, {"linear": "affine_like"})[FOLDED])


def verdicts(results: dict[str, Any]) -> list[Verdict]:
    """All budgets, in the order of the design, by what a run of `python -m benchmarks` found."""
    rows = []
    for work, section, row, to, limit in _RATIOS:
        if section not in results:
            rows.append(Verdict(work, limit, "×", None, "not in this run"))
            continue
        ratio = results[section].ratio(row, to)
        rows.append(Verdict(work, limit, "×", ratio.value, f"95 % interval {ratio.low:.2f} … {ratio.high:.2f}"))
    for work, limit in (
        ("CUDA, bf16 16384×4096: AutoNorm, forward + backward, of F.layer_norm", 1.5),
        ("CUDA, bf16 16384×4096: AutoNorm, forward + backward, of Liger's DyT", 1.1),
    ):
        rows.append(Verdict(work, limit, "×", None, "python -m benchmarks.cuda, on a GPU"))
    stock = folds_to_stock()
    memory, patching = results.get("activation memory"), results.get("patch time")
    imports, folded = results.get("import time"), results.get("MiniLM, training step")
    rows += [
        Verdict(
            "activations saved by a training step, 12-layer ViT-Lite, of unpatched",
            1.10,
            "×",
            memory and memory.ratio("AutoNorm"),
            f"as the formula reads {memory.ratio('naive AutoNorm'):.2f}" if memory else "not in this run",
        ),
        Verdict(
            "after fold to the original, training step, of unpatched",
            1.00,
            "×",
            1.0 if stock else float("inf"),
            ("same classes, same state dict" if stock else "not the stock model")
            + (f"; timed: {folded.ratio(FOLDED).value:.2f}" if folded else ""),
        ),
        Verdict(
            "patch, Llama 8 B on the meta device, norms",
            1.0,
            "s",
            patching and patching.seconds["norms"].get("8 B"),
            f"grows with the modules to the power of {patching.exponent('norms'):.2f}"
            if patching
            else "not in this run",
        ),
        Verdict(
            "import hf_autonorm beyond AutoModel and Trainer",
            0.15,
            "s",
            imports and imports.median,
            f"CPU time {min(imports.ours_cpu):.2f} s" if imports else "not in this run",
        ),
    ]
    return rows
