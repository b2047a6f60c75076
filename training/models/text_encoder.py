"""A text encoder from scratch: 12 layers, width 128, 8 heads, as a RoBERTa, and its tokenizer, trained on the data."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RobertaConfig, RobertaTokenizer

from hf_autonorm.hub.reading import load_tokenizer
from training.models import class_names, parse_overrides, resolve_model

MAX_LENGTH = 512
VOCABULARY = 10_000
SIZES = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 512}


def train_tokenizer(texts: Iterable[str | list[str]]) -> RobertaTokenizer:
    """Byte pairs of `texts`, `VOCABULARY` tokens at most, in upper and lower case.

    Byte pairs, since the same texts always give the same ones; trained WordPieces hang on the order of a hash table,
    and differ between the processes of a run.
    """
    lines = (text if isinstance(text, str) else " ".join(text) for text in texts)
    empty = RobertaTokenizer(add_prefix_space=True, model_max_length=MAX_LENGTH)  # a first word is a word
    return empty.train_new_from_iterator(lines, VOCABULARY, show_progress=False)


def text_encoder(auto_class, tokenizer: RobertaTokenizer, overrides: str | None = None, **labels) -> PreTrainedModel:
    """With fresh weights and the head of `auto_class`; `labels` name the classes.

    overrides: of `SIZES`, as `--config_overrides` takes them.
    """
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_LENGTH + tokenizer.pad_token_id + 1,  # positions go on after the padding's
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES | parse_overrides(overrides, SIZES, "text_encoder"),
        **labels,
    )
    return auto_class.from_config(config)


def load_text_model(
    args, auto_class, texts: Iterable[str | list[str]], names: list[str], **options
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """(tokenizer, model) that `args` name: from scratch, the tokenizer trained on `texts`, or pretrained.

    names: of the classes. options: for the tokenizer of a pretrained model.
    """
    if args.model_name_or_path == "text_encoder":
        tokenizer = train_tokenizer(texts)
        return tokenizer, text_encoder(auto_class, tokenizer, args.config_overrides, **class_names(names))
    path = resolve_model(args.model_name_or_path, args.config_overrides)
    tokenizer = load_tokenizer(path, **options)
    return tokenizer, auto_class.from_pretrained(path, dtype=torch.float32, **class_names(names))
