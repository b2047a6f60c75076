"""Rows for the tasks: from the Hub by id, or from local files as they come (`--data_dir`, a folder or one file)."""

from pathlib import Path

from datasets import ClassLabel, DatasetDict, load_dataset

from training.data.files import read_files
from training.data.splits import three_splits

__all__ = ["dataset_card", "find_column", "load_splits", "three_splits", "with_class_labels"]


def load_splits(args, where_to_get: str = "") -> DatasetDict:
    """The splits as published, of `--data_dir` if given, else of `--dataset_name` on the Hub.

    `where_to_get` completes the error of a recipe whose data is not on the Hub.
    """
    if args.data_dir:
        return read_files(args.data_dir)
    if args.dataset_name is None:
        raise ValueError(f"No data: give --data_dir, or --dataset_name with a Hub id. {where_to_get}".strip())
    return load_dataset(args.dataset_name, args.dataset_config)


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


def with_class_labels(splits: DatasetDict, label: str) -> DatasetDict:
    """The label column as class labels; of plain integers or strings, the sorted values are the classes."""
    if isinstance(splits["train"].features[label], ClassLabel):
        return splits
    values = sorted({value for split in splits.values() for value in split.unique(label)})
    index = {value: i for i, value in enumerate(values)}

    def to_index(batch):
        return {label: [index[value] for value in batch[label]]}

    features = splits["train"].features.copy()
    features[label] = ClassLabel(names=[str(value) for value in values])
    return splits.map(to_index, batched=True, features=features, desc="Reading labels")
