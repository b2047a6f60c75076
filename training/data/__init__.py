"""Rows for the tasks: from the Hub by id, or from local files as they come (`--data_dir`, a folder or one file)."""

from collections.abc import Iterable
from pathlib import Path

from datasets import ClassLabel, DatasetDict, Value, load_dataset

from training.data.files import read_files
from training.data.splits import three_splits

__all__ = ["dataset_card", "find_column", "load_splits", "require_texts", "three_splits", "with_class_labels"]


def load_splits(args, where_to_get: str = "") -> DatasetDict:
    """The splits as published, of `--data_dir` if given, else of `--dataset_name` on the Hub.

    `where_to_get` completes the error of a recipe whose data is not on the Hub.
    """
    if args.data_dir:
        splits = read_files(args.data_dir)
    elif args.dataset_name is None:
        raise ValueError(f"No data: give --data_dir, or --dataset_name with a Hub id. {where_to_get}".strip())
    else:
        splits = load_dataset(args.dataset_name, args.dataset_config)
    if "train" not in splits:
        raise ValueError(f"{args.data_dir or args.dataset_name} has no training split, only {', '.join(splits)}.")
    return splits


def dataset_card(args) -> dict[str, str]:
    """What the model card says of the data."""
    if args.data_dir:
        return {"name": Path(args.data_dir).resolve().name}
    return {"type": args.dataset_name} | ({"config": args.dataset_config} if args.dataset_config else {})


def find_column(splits: DatasetDict, wanted: str | None, option: str, kind: type | None = None) -> str:
    """`wanted` if the data has it, else the only column whose feature is a `kind`.

    Local copies name their columns otherwise than the Hub (`image` of an image folder, `img` of CIFAR).
    """
    features = splits["train"].features
    if wanted in features:
        return wanted
    fitting = [name for name, feature in features.items() if kind is not None and isinstance(feature, kind)]
    if len(fitting) != 1:
        raise ValueError(f"The data has no column {wanted!r}; name one of {', '.join(features)} by --{option}.")
    return fitting[0]


def require_texts(splits: DatasetDict, text: str) -> None:
    """Raises ValueError where a row of the column has no text; a CSV file's NA, None or null is read as none."""
    for name, split in splits.items():
        feature = split.features[text]
        if getattr(feature, "dtype", None) not in ("string", "large_string"):
            raise ValueError(f"The column {text!r} of {name} holds {feature}, not texts.")
        _require_whole(name, text, split[text][:])


def _require_whole(name: str, column: str, values: Iterable) -> None:
    if missing := sum(value is None for value in values):
        raise ValueError(
            f"{missing} rows of {name} have nothing in the column {column!r}: leave them out. In a CSV file NA, None "
            "and null are nothing, too; in a TSV file they are words."
        )


def with_class_labels(splits: DatasetDict, label: str) -> DatasetDict:
    """The label column as class labels; of plain integers or strings, the sorted values are the classes.

    Raises ValueError where a row has no label, where labels are no classes, and where there is but one.
    """
    for name, split in splits.items():
        if not isinstance(split.features[label], (ClassLabel, Value)):
            raise ValueError(f"The column {label!r} of {name} holds {split.features[label]}, not one class a row.")
        _require_whole(name, label, (None if value == -1 else value for value in split[label][:]))
    values = {value for split in splits.values() for value in split[label][:]}  # `unique` copies the images, too
    if len(values) < 2:
        raise ValueError(f"All rows have the same label in the column {label!r}: {values}. There is nothing to learn.")
    if isinstance(splits["train"].features[label], ClassLabel):
        return splits
    if len({type(value) for value in values}) > 1:
        kinds = ", ".join(f"{split.features[label].dtype} in {name}" for name, split in splits.items())
        raise ValueError(f"The column {label!r} is of several types: {kinds}.")
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise ValueError(f"The column {label!r} holds fractions, not classes; tabular_regression learns numbers.")
    values = sorted(values)
    index = {value: i for i, value in enumerate(values)}

    def to_index(batch):
        return {label: [index[value] for value in batch[label]]}

    features = splits["train"].features.copy()
    features[label] = ClassLabel(names=[str(value) for value in values])
    return splits.map(to_index, batched=True, features=features, desc="Reading labels")
