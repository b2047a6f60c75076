"""Part-of-speech tagging: one tag a word, learned and scored on the word's first sub-token.

Data: `tokens` and a tag column (`--label_column`: `upos`, 17 universal tags; `xpos`, Penn tags), in Hub datasets or
local files: parquet, CoNLL-U files, or bracketed trees of the Penn Treebank, whose splits `read_trees` tells. The tags
may be strings or class labels.
"""

import torch
from datasets import DatasetDict, LargeList, List, Value
from torch.nn import functional
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from training.data import dataset_card, find_column, load_splits, three_splits
from training.losses import cross_entropy
from training.metrics import load_metric
from training.models.text_encoder import load_text_model
from training.tasks import Task, take

NLTK = "NLTK's sample of the Penn Treebank: python -m nltk.downloader treebank, then .../corpora/treebank/combined."
IGNORED = -100  # the index that PyTorch's cross entropy leaves out
NO_TAG = "_"  # on the surface form of a contraction ("don't") whose parts follow as words of their own


def load(args, training_args) -> Task:
    splits = load_splits(args, NLTK)
    text = find_column(splits, args.text_column or "tokens", "text_column")
    label = find_column(splits, args.label_column or "upos", "label_column")
    splits = three_splits(splits, label).select_columns([text, label])
    for name, split in splits.items():
        for column in (text, label):
            if not isinstance(split.features[column], (List, LargeList)):
                raise ValueError(f"The column {column!r} of {name} holds {split.features[column]}, not lists.")
    splits = with_string_tags(splits, label)
    tags = sorted({tag for split in splits.values() for row in split[label] for tag in row} - {NO_TAG})
    splits = take(splits, args.max_train_samples, args.max_eval_samples)

    # A prefix space: words come apart already.
    tokenizer, model = load_text_model(
        args, AutoModelForTokenClassification, splits["train"][text], tags, add_prefix_space=True
    )
    splits = splits.map(
        encoder(tokenizer, text, label, {tag: index for index, tag in enumerate(tags)}, args.max_length),
        batched=True,
        remove_columns=[text, label],
        num_proc=args.preprocessing_num_workers,
        desc="Tokenizing",
    )
    return Task(
        model=model,
        processing_class=tokenizer,
        splits=splits,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=scorer(),
        dataset=dataset_card(args),
        preprocess_logits_for_metrics=tags_and_losses,
        compute_loss=cross_entropy(training_args.label_smoothing_factor),
    )


def with_string_tags(splits: DatasetDict, label: str) -> DatasetDict:
    feature = getattr(next(iter(splits.values())).features[label], "feature", None)
    if not hasattr(feature, "int2str"):
        return splits

    def to_strings(batch):
        return {label: [feature.int2str(row) for row in batch[label]]}

    features = next(iter(splits.values())).features.copy()
    features[label] = List(Value("string"))
    return splits.map(to_strings, batched=True, features=features, desc="Reading tags")


def encoder(tokenizer, text: str, label: str, label2id: dict, max_length: int | None):
    # A closure, since `datasets` hashes those with their code; a function of a module it hashes by its name alone,
    # and would go on serving the cache of an older version.
    def encode(batch):
        encoded = tokenizer(batch[text], is_split_into_words=True, truncation=True, max_length=max_length)
        encoded["labels"] = []
        for row, tags in enumerate(batch[label]):
            if len(batch[text][row]) != len(tags):
                raise ValueError(f"{len(batch[text][row])} words, but {len(tags)} tags: {batch[text][row]}.")
            words = encoded.word_ids(row)  # None at special tokens
            first = [word is not None and word != before for before, word in zip([None, *words], words)]
            labels = [label2id.get(tags[word], -100) if is_first else -100 for is_first, word in zip(first, words)]
            encoded["labels"].append(labels)
        return encoded

    return encode


def tags_and_losses(logits, labels) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, tokens) each: the likeliest tag, the cross entropy (nats); two numbers a token, not one a tag."""
    losses = functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return logits.argmax(-1), losses


def scorer():
    """Accuracy, macro-F1 and perplexity, a word each time."""
    accuracy, f1, perplexity = load_metric("accuracy"), load_metric("f1"), load_metric("perplexity")

    def compute_metrics(output) -> dict[str, float]:
        counted = output.label_ids != IGNORED
        tags, losses = output.predictions
        pairs = {"predictions": tags[counted], "references": output.label_ids[counted]}
        return {
            **accuracy.compute(**pairs),
            "f1_macro": f1.compute(**pairs, average="macro")["f1"],
            **perplexity.compute(predictions=losses[counted]),
            "words": int(counted.sum()),
        }

    return compute_metrics
