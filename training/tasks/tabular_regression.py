"""One or more numbers from the other numbers of a table's row.

Data: numeric columns, `--target_columns` among them, in Hub datasets or local files (CSV, xlsx, StatLib's
`cal_housing.data`). A single table is cut 70/15/15 by seed 0 (`three_splits`). Features and targets are standardised
by the training rows inside the model; all metrics are in the data's units. Rows that lack a number are left out.
"""

import warnings

import numpy as np
import torch
from datasets import Value
from transformers import AutoModel, default_data_collator

from training.data import dataset_card, load_splits, three_splits
from training.metrics import load_metric
from training.models import parse_overrides, resolve_model
from training.models.feature_transformer import FeatureTransformer, FeatureTransformerConfig
from training.tasks import Task, take

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "dropout")  # to override
UCI = "Energy Efficiency is at https://archive.ics.uci.edu/dataset/242: ENB2012_data.xlsx."


def load(args, training_args) -> Task:
    splits = load_splits(args, UCI)
    features, targets = columns_of(splits, args.target_columns)
    splits = three_splits(splits, targets[0]).select_columns([*features, *targets])
    splits = take(splits, args.max_train_samples, args.max_eval_samples)
    splits = splits.map(
        row_reader(features, targets),
        batched=True,
        remove_columns=splits["train"].column_names,
        num_proc=args.preprocessing_num_workers,
        desc="Reading rows",
    ).with_format("torch")
    for name, split in splits.items():
        if not len(split):
            raise ValueError(
                f"No row of {name} has a number in each of the columns {', '.join([*features, *targets])}."
            )
    train = splits["train"][:]
    if args.model_name_or_path == "feature_transformer":
        sizes = parse_overrides(args.config_overrides, SIZES, "feature_transformer")
        model = FeatureTransformer(FeatureTransformerConfig(features=features, targets=targets, **sizes))
        model.feature_scale.fit(train["features"])
        model.target_scale.fit(train["labels"])
    else:
        path = resolve_model(args.model_name_or_path, args.config_overrides)
        model = AutoModel.from_pretrained(path, dtype=torch.float32)
        if (model.config.features, model.config.targets) != (features, targets):
            raise ValueError(
                f"{args.model_name_or_path} goes from {model.config.features} to {model.config.targets}, "
                f"the data from {features} to {targets}."
            )
    return Task(
        model=model,
        processing_class=None,
        splits=splits,
        data_collator=default_data_collator,
        compute_metrics=scorer(targets),
        dataset=dataset_card(args),
    )


def columns_of(splits, targets: list[str] | None) -> tuple[list[str], list[str]]:
    """The names of the features, every numeric column that is no target, and of the targets."""
    columns = splits["train"].features
    kinds = ("int", "uint", "float", "bool")
    numeric = [name for name, f in columns.items() if isinstance(f, Value) and f.dtype.startswith(kinds)]
    missing = [name for name in targets or [] if name not in numeric]
    if missing or not targets:
        raise ValueError(f"--target_columns {targets}: give numeric columns of the data, out of {', '.join(numeric)}.")
    features = [name for name in numeric if name not in targets]
    if not features:
        raise ValueError(f"The data has no numeric column beside {', '.join(targets)}.")
    if left_out := [name for name in columns if name not in numeric]:
        warnings.warn(f"Left out, since they are not numbers throughout: {', '.join(left_out)}.")
    return features, list(dict.fromkeys(targets))


def row_reader(features: list[str], targets: list[str]):
    def read(batch):  # a closure, for the cache: see pos_tagging.py
        values = {name: np.array(batch[name], dtype=np.float64) for name in [*features, *targets]}
        whole = np.all([np.isfinite(column) for column in values.values()], axis=0)
        return {
            "features": np.stack([values[name][whole] for name in features], axis=1).astype(np.float32),
            "labels": np.stack([values[name][whole] for name in targets], axis=1).astype(np.float32),
        }

    return read


def scorer(targets: list[str]):
    """RMSE and MAE: the mean over targets, and of each where there are several."""
    metrics = {name: load_metric(name) for name in ("rmse", "mae")}

    def compute_metrics(output) -> dict[str, float]:
        result = {}
        for name, metric in metrics.items():
            columns = zip(targets, output.predictions.T, output.label_ids.T)
            each = {key: metric.compute(predictions=p, references=r)[name] for key, p, r in columns}
            result[name] = float(np.mean(list(each.values())))
            if len(each) > 1:
                result |= {f"{name}_{key}": value for key, value in each.items()}
        return result

    return compute_metrics
