"""Part-of-speech tagging: one tag a word, learned and scored on the word's first sub-token.

Data: `tokens` and a tag column (`--label_column`: `upos`, 17 universal tags; `xpos`, Penn tags), in Hub datasets or
local folders; the tags may be strings or class labels.
"""

from pathlib import Path

import torch
from datasets import DatasetDict, Sequence, Value, load_dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

from training.metrics import load_metric
from training.models import resolve_model
from training.tasks import Task, take

IGNORED = -100  # the index that PyTorch's cross entropy leaves out
NO_TAG = "_"  # on the surface form of a contraction ("don't") whose parts follow as words of their own


def load(args) -> Task:
    source = (args.data_dir,) if args.data_dir else (args.dataset_name, args.dataset_config)
    if args.data_dir:
        dataset = {"name": Path(args.data_dir).resolve().name}
    else:
        dataset = {"type": args.dataset_name} | ({"config": args.dataset_config} if args.dataset_config else {})
    text, label = args.text_column or "tokens", args.label_column or "upos"
    splits = load_dataset(*source).select_columns([text, label])
    splits = with_string_tags(splits, label)
    tags = sorted({tag for split in splits.values() for row in split[label] for tag in row} - {NO_TAG})
    splits = take(splits, args.max_train_samples, args.max_eval_samples)

    path = resolve_model(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path, add_prefix_space=True)  # words come apart already
    label2id = {tag: index for index, tag in enumerate(tags)}
    encode = encoder(tokenizer, text, label, label2id, args.max_length)
    splits = splits.map(encode, batched=True, remove_columns=[text, label], desc="Tokenizing")

    model = AutoModelForTokenClassification.from_pretrained(
        path, dtype=torch.float32, label2id=label2id, id2label=dict(enumerate(tags)), num_labels=len(tags)
    )
    return Task(
        model=model,
        processing_class=tokenizer,
        splits=splits,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=scorer(),
        dataset=dataset,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),  # one index a token, not 17 scores
    )


def with_string_tags(splits: DatasetDict, label: str) -> DatasetDict:
    feature = getattr(next(iter(splits.values())).features[label], "feature", None)
    if not hasattr(feature, "int2str"):
        return splits

    def to_strings(batch):
        return {label: [feature.int2str(row) for row in batch[label]]}

    features = next(iter(splits.values())).features.copy()
    features[label] = Sequence(Value("string"))
    return splits.map(to_strings, batched=True, features=features, desc="Reading tags")


def encoder(tokenizer, text: str, label: str, label2id: dict, max_length: int | None):
    # A closure, since `datasets` hashes those with their code; a function of a module it hashes by its name alone,
    # and would go on serving the cache of an older version.
    def encode(batch):
        encoded = tokenizer(batch[text], is_split_into_words=True, truncation=True, max_length=max_length)
        encoded["labels"] = []
        for row, tags in enumerate(batch[label]):
            words = encoded.word_ids(row)  # None at special tokens
            first = [word is not None and word != before for before, word in zip([None, *words], words)]
            labels = [label2id.get(tags[word], -100) if is_first else -100 for is_first, word in zip(first, words)]
            encoded["labels"].append(labels)
        return encoded

    return encode


def scorer():
    accuracy, f1 = load_metric("accuracy"), load_metric("f1")

    def compute_metrics(output) -> dict[str, float]:
        counted = output.label_ids != IGNORED
        pairs = {"predictions": output.predictions[counted], "references": output.label_ids[counted]}
        return {
            **accuracy.compute(**pairs),
            "f1_macro": f1.compute(**pairs, average="macro")["f1"],
            "words": int(counted.sum()),
        }

    return compute_metrics
