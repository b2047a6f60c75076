"""Local files as they come: what kind they are, which split each belongs to."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from training.data import idx, tables, treebank

SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation"}
SPLITS |= {"val": "validation", "dev": "validation", "test": "test", "testing": "test", "t10k": "test"}
SPLITS |= {"extra": "extra"}


def split_of(path: Path, root: Path) -> str:
    """By a word of its own in the file's name or, nearest first, its folders' (`en_ewt-ud-dev.conllu`, `test/0`)."""
    for part in reversed(path.relative_to(root).parts):
        words = re.split(r"[^a-z0-9]+", part.lower())
        found = [SPLITS[word] for word in words if word in SPLITS]
        if found:
            return found[0]
    return "train"


def read_packaged(module: str, **options) -> Callable:
    """A reader of `datasets` itself; each split alone, since their columns may differ (a test without labels)."""

    def read(files: list[Path], root: Path) -> DatasetDict:
        grouped = {}
        for file in files:
            grouped.setdefault(split_of(file, root), []).append(str(file))
        return DatasetDict(
            {
                name: load_dataset(module, data_files=members, split="train", **options)
                for name, members in grouped.items()
            }
        )

    return read


def read_images(files: list[Path], root: Path) -> DatasetDict:
    return load_dataset("imagefolder", data_dir=str(root))


def read_each(read_file: Callable[[Path], Dataset]) -> Callable:
    def read(files: list[Path], root: Path) -> DatasetDict:
        by_split = {split_of(file, root): file for file in files}
        if len(by_split) != len(files):
            raise ValueError(f"{root} holds {len(files)} tables of the same split; name one file by --data_dir.")
        return DatasetDict({name: read_file(file) for name, file in by_split.items()})

    return read


# The first kind that a folder holds is read; a folder may hold the same table twice (.csv and .xlsx).
KINDS = (
    ("idx", r".*idx\d-ubyte(\.gz)?", idx.read),
    ("parquet", r".*\.parquet", read_packaged("parquet")),
    ("arrow", r".*\.arrow", read_packaged("arrow")),
    ("treebank", r".*\.mrg", treebank.read_trees),
    ("conllu", r".*\.conllu", treebank.read_conllu),
    ("StatLib", r"cal_housing\.data(\.gz)?", read_each(tables.read_statlib)),
    # No quoting: GLUE's sentences have quotes of their own.
    ("tsv", r".*\.tsv", read_packaged("csv", sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)),
    ("csv", r".*\.csv(\.gz)?", read_packaged("csv")),
    ("xlsx", r".*\.xlsx", read_each(tables.read_xlsx)),
    ("images", r"(?i).*\.(png|jpe?g|webp|bmp)", read_images),
)


def read_files(source: str) -> DatasetDict:
    """The splits in a folder, or in one file; every kind in `KINDS`, and what `DatasetDict.save_to_disk` wrote."""
    path = Path(source)
    if not path.exists():
        raise ValueError(f"data_dir={source!r} does not exist.")
    if (path / "dataset_dict.json").is_file():
        return load_from_disk(str(path))
    root = path if path.is_dir() else path.parent
    # What is hidden is no data: copies of editors, halves of macOS' zip files.
    files = [p for p in path.rglob("*") if p.is_file() and not re.search(r"(^|/)[.~]", p.relative_to(path).as_posix())]
    for _, pattern, read in KINDS:
        fitting = [file for file in (sorted(files) if path.is_dir() else [path]) if re.fullmatch(pattern, file.name)]
        if fitting:
            try:
                splits = read(fitting, root)
            except DatasetGenerationError as error:
                raise ValueError(f"data_dir={source!r} cannot be read: {error.__cause__ or error}") from error
            # One file is one table, whatever its name says.
            return splits if path.is_dir() or len(splits) != 1 else DatasetDict(train=next(iter(splits.values())))
    names = ", ".join(kind for kind, _, _ in KINDS)
    raise ValueError(f"data_dir={source!r} holds no file of a known kind ({names}).")
