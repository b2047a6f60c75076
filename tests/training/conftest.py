from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def ewt(shared) -> Path:
    return shared / "data" / "ud_english_ewt"


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """One BERT layer of width 32; a tokenizer of the same kind as MiniLM's, small since `datasets` hashes it often."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from training.models import resolve_model

    folder = tmp_path_factory.mktemp("tiny_bert")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("minilm"))
    tokenizer = tokenizer.train_new_from_iterator(["I do n't like antidisestablishmentarianism . Dogs bark !"], 200)
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
