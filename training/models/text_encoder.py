"""A text encoder from scratch: 12 layers, width 128, 8 heads, as a BERT, and its tokenizer, trained on the data."""

from collections.abc import Iterable

from transformers import BertConfig, BertTokenizer, PreTrainedModel

MAX_LENGTH = 512
VOCABULARY = 10_000


def train_tokenizer(texts: Iterable[str | list[str]], lower_case: bool) -> BertTokenizer:
    """WordPieces of `texts`, at most `VOCABULARY` of them; the same texts give the same tokenizer."""
    lines = (text if isinstance(text, str) else " ".join(text) for text in texts)
    empty = BertTokenizer(do_lower_case=lower_case, model_max_length=MAX_LENGTH)
    return empty.train_new_from_iterator(lines, VOCABULARY, show_progress=False)


def text_encoder(auto_class, tokenizer: BertTokenizer, **labels) -> PreTrainedModel:
    """With fresh weights and the head of `auto_class`; `labels` name the classes."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=512,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )
    return auto_class.from_config(config)
