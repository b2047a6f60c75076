"""Small models for the tests of saving and cards."""

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_autonorm import patch


def tiny_bert(seed: int = 0, patched: bool = True, **options) -> nn.Module:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    model = BertForSequenceClassification(config).eval()
    return patch(model, **options) if patched else model


def tiny_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)).eval()


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Equal names, dtypes and bits."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
