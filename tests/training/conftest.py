import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("HF_AUTONORM_SHARED", ROOT.parent / "shared"))

sys.path.insert(0, str(ROOT / "training"))  # as `python training/train.py` does


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def ewt() -> Path:
    folder = SHARED / "data" / "ud_english_ewt"
    if not folder.exists():
        pytest.skip(f"no {folder}: set HF_AUTONORM_SHARED to the folder that has data/ud_english_ewt")
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """One BERT layer of width 32 under the real MiniLM tokenizer."""
    import torch
    from models import resolve_model
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny_bert")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("minilm"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tagged_words(tmp_path_factory) -> Path:
    """A few rows in the layout of the EWT folder."""
    from datasets import Dataset

    rows = {
        "tokens": [["I", "do", "n't", "like", "antidisestablishmentarianism", "."], ["Dogs", "bark", "!"]] * 8,
        "upos": [["PRON", "AUX", "PART", "VERB", "NOUN", "PUNCT"], ["NOUN", "VERB", "PUNCT"]] * 8,
        "xpos": [["PRP", "VBP", "RB", "VB", "NN", "."], ["NNS", "VBP", "."]] * 8,
    }
    folder = tmp_path_factory.mktemp("tagged_words")
    for split in ("train", "validation", "test"):
        Dataset.from_dict(rows).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder
