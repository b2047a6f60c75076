"""Sentence embeddings of an encoder."""

import torch
from torch import nn


def batched(tokenizer, texts: list[str], size: int) -> list[dict]:
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    return [dict(tokenizer(part, padding=True, truncation=True, return_tensors="pt")) for part in parts]


@torch.no_grad()
def embed(model: nn.Module, tokenizer, texts: list[str]) -> torch.Tensor:
    """(texts, width): the normalised mean of the token embeddings, padding left out."""
    pieces = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of one length together: little padding
    for batch in batched(tokenizer, [texts[i] for i in order], 64):
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        pieces.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(pieces)[torch.tensor(order).argsort()]
