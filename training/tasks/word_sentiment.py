"""The sentiment of single English words and emoticons: negative or positive.

Data: `vader_lexicon.txt` out of the PyPI package `vaderSentiment` (MIT), 7,520 rows: word, mean and spread of the
ratings of ten people from -4 to 4, the ratings. No mean is 0; its sign is the label. Every row is used: where people
disagree (|mean| < 0.5, 9 % of the rows) the label is noisy, for every variant alike.

Splits, 70/15/15, by a hash of the word's first four letters in lower case: "LOL" and "lol" are one input to an uncased
model, and "foolish", "foolishly", "foolishness" in different splits would test memory. A family is then right or wrong
as a whole, so the accuracy of a split is that of some 250 independent trials, not of 1,100.
"""

import csv
import hashlib

import torch
from datasets import Dataset, DatasetDict, load_dataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from hf_autonorm.hub.reading import load_tokenizer
from training.losses import cross_entropy
from training.metrics import classification_scorer
from training.models import class_names, package_folder, resolve_model
from training.tasks import Task, take

LABELS = ("negative", "positive")
COLUMNS = ("word", "rating", "spread", "ratings")


def load(args, training_args) -> Task:
    splits = take(split_by_family(load_lexicon(args.data_dir)), args.max_train_samples, args.max_eval_samples)
    path = resolve_model(args.model_name_or_path, args.config_overrides)
    tokenizer = load_tokenizer(path)
    encode = encoder(tokenizer, args.max_length)
    splits = splits.map(encode, batched=True, remove_columns=list(COLUMNS), desc="Tokenizing")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, **class_names(LABELS))
    return Task(
        model=model,
        processing_class=tokenizer,
        splits=splits,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=classification_scorer(),
        dataset={"name": "the VADER lexicon (PyPI package vaderSentiment)"},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_loss=cross_entropy(training_args.label_smoothing_factor),
    )


def load_lexicon(folder: str | None = None) -> Dataset:
    folder = folder or package_folder("vaderSentiment", "vaderSentiment")
    return load_dataset(
        "csv",
        data_files=f"{folder}/vader_lexicon.txt",
        split="train",
        sep="\t",
        names=list(COLUMNS),
        quoting=csv.QUOTE_NONE,  # emoticons have quotes of their own
        keep_default_na=False,
    )


def split_of(word: str) -> str:
    share = int(hashlib.sha256(word.lower()[:4].encode()).hexdigest()[:8], 16) / 16**8
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def split_by_family(lexicon: Dataset) -> DatasetDict:
    rows = {"train": [], "validation": [], "test": []}
    for index, word in enumerate(lexicon["word"][:]):
        rows[split_of(word)].append(index)
    return DatasetDict({name: lexicon.select(indices) for name, indices in rows.items()})


def encoder(tokenizer, max_length: int | None):
    def encode(batch):  # a closure, for the cache: see pos_tagging.py
        encoded = tokenizer(batch["word"], truncation=True, max_length=max_length)
        encoded["labels"] = [int(rating > 0) for rating in batch["rating"]]
        return encoded

    return encode
