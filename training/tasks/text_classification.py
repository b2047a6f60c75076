"""The class of a sentence or phrase.

Data: a text and a label column, in Hub datasets or local files (parquet, GLUE's TSV, CSV). Splits where not all three
are published: `three_splits`, by seed 0. For SST-2, whose test labels are hidden, the test is thus the published
validation split, and validation comes out of the training rows. Those are phrases of which many overlap, so accuracy
there is better than on the test's whole sentences, for every variant alike.
"""

from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from training.data import dataset_card, find_column, load_splits, require_texts, three_splits, with_class_labels
from training.losses import cross_entropy
from training.metrics import classification_scorer
from training.models.text_encoder import load_text_model
from training.tasks import Task, take


def load(args, training_args) -> Task:
    splits = load_splits(args)
    text = find_column(splits, args.text_column or "text", "text_column")
    label = find_column(splits, args.label_column or "label", "label_column")
    splits = three_splits(splits, label).select_columns([text, label])
    splits = with_class_labels(splits, label)
    require_texts(splits, text)
    names = splits["train"].features[label].names
    splits = take(splits, args.max_train_samples, args.max_eval_samples)

    tokenizer, model = load_text_model(args, AutoModelForSequenceClassification, splits["train"][text], names)
    splits = splits.map(
        encoder(tokenizer, text, label, args.max_length),
        batched=True,
        remove_columns=[text, label],
        num_proc=args.preprocessing_num_workers,
        desc="Tokenizing",
    )
    return Task(
        model=model,
        processing_class=tokenizer,
        splits=splits,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=classification_scorer(),
        dataset=dataset_card(args),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_loss=cross_entropy(training_args.label_smoothing_factor),
    )


def encoder(tokenizer, text: str, label: str, max_length: int | None):
    def encode(batch):  # a closure, for the cache: see pos_tagging.py
        encoded = tokenizer(batch[text], truncation=True, max_length=max_length)
        encoded["labels"] = batch[label]
        return encoded

    return encode
