"""Rows made by code of our own, cached by `datasets` until that code or one of the files changes."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from datasets import Dataset, Features


def cached_rows(rows: Callable[..., Iterator[dict]], files: list[Path], features: Features) -> Dataset:
    """What `rows(*files)` yields."""

    def generate(files, stamps):
        yield from rows(*files)

    # `datasets` hashes a function of a module by its name alone, and a file by its path.
    stamps = (inspect.getsource(inspect.getmodule(rows)), *((f.stat().st_mtime_ns, f.stat().st_size) for f in files))
    return Dataset.from_generator(
        generate, gen_kwargs={"files": tuple(files), "stamps": stamps}, features=features, split="train"
    )
