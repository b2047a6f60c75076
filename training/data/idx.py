"""MNIST's own format: `train-images-idx3-ubyte(.gz)` beside `train-labels-idx1-ubyte(.gz)`, and `t10k-…` for the test.

An idx file is two zero bytes, the type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian
32-bit integer, then the values.
"""

import gzip
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import ClassLabel, DatasetDict, Features, Image

from training.data.stamps import cached_rows

DIGITS = ClassLabel(names=[str(digit) for digit in range(10)])


def read(files: list[Path], root: Path) -> DatasetDict:
    by_name = {re.sub(r"\.gz$", "", file.name).replace(".idx", "-idx"): file for file in files}
    splits = DatasetDict()
    for prefix, name in (("train", "train"), ("t10k", "test"), ("test", "test")):
        images, labels = by_name.get(f"{prefix}-images-idx3-ubyte"), by_name.get(f"{prefix}-labels-idx1-ubyte")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            raise ValueError(f"{root} has only one of {prefix}-images-idx3-ubyte and {prefix}-labels-idx1-ubyte.")
        splits[name] = cached_rows(labelled_images, [images, labels], Features(image=Image(), label=DIGITS))
    return splits


def labelled_images(images: Path, labels: Path) -> Iterator[dict]:
    pixels, classes = read_array(images), read_array(labels)
    if len(pixels) != len(classes):
        raise ValueError(f"{images} has {len(pixels)} images, {labels} {len(classes)} labels.")
    for image, label in zip(pixels, classes):
        yield {"image": image, "label": int(label)}


def read_array(file: Path) -> np.ndarray:
    """uint8, of the shape that the file states."""
    data = (gzip.open if file.suffix == ".gz" else open)(file, "rb").read()
    dimensions = data[3] if len(data) > 4 else 0
    shape = np.frombuffer(data, ">u4", dimensions, offset=4) if len(data) >= 4 + 4 * dimensions else ()
    values = data[4 + 4 * dimensions :]
    if data[:3] != b"\0\0\x08" or len(values) != math.prod(map(int, shape)):
        raise ValueError(f"{file} is not an idx file of unsigned bytes, or not all of one.")
    return np.frombuffer(values, np.uint8).reshape([int(size) for size in shape])
