"""A few rows of each recipe's data, written in the formats that the data comes in."""

import gzip
import struct
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as Pillow

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
TREE = """
( (S
    (NP-SBJ (NNP Pierre) (NNP Vinken) (, ,))
    (VP (MD will) (VP (VB join) (NP (DT the) (NN board)) (NP (-NONE- *T*-1)) (-LRB- -LRB-) (CD 61\\/2) (-RRB- -RRB-)))
    (. .) ))
( (S (NP-SBJ (NNP Mr.) (NNP Vinken)) (VP (VBZ is) (NP-PRD (NN chairman))) (. .) ))
"""
CONLLU = """\
# sent_id = 1
# text = I don't like it.
1\tI\tI\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
4\tlike\tlike\tVERB\tVB\t_\t0\troot\t_\t_
4.1\tliked\tlike\tVERB\tVB\t_\t_\t_\t_\t_
5\tit\tit\tPRON\tPRP\t_\t4\tobj\t_\t_
6\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_

"""


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_idx(file: Path, values: np.ndarray) -> None:
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    (gzip.open if file.suffix == ".gz" else open)(file, "wb").write(head + values.tobytes())


def mnist(folder: Path) -> None:
    for split, count in (("train", 24), ("t10k", 8)):
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", pictures(count, (28, 28)))
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 10)


def fashion_mnist(folder: Path) -> None:
    for split, count in (("train", 24), ("test", 8)):
        for index, image in enumerate(pictures(count, (28, 28))):
            place = folder / split / ("bag", "coat")[index % 2] / f"{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Pillow.fromarray(image).save(place)


def coloured(count: int, image: str, labels: dict[str, ClassLabel]) -> Dataset:
    rows = {image: list(pictures(count, (32, 32, 3)))}
    rows |= {name: [i % feature.num_classes for i in range(count)] for name, feature in labels.items()}
    return Dataset.from_dict(rows, features=Features({image: Image(), **labels}))


def svhn(folder: Path) -> None:
    labels = {"label": ClassLabel(names=[str(digit) for digit in range(10)])}
    for split, count in (("train", 24), ("test", 8), ("extra", 4)):
        coloured(count, "image", labels).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def cifar10(folder: Path) -> None:
    labels = {"label": ClassLabel(names=CIFAR10)}
    splits = {split: coloured(count, "img", labels) for split, count in (("train", 24), ("test", 8))}
    DatasetDict(splits).save_to_disk(str(folder))


def cifar100(folder: Path) -> None:
    names = {"fine_label": 100, "coarse_label": 20}
    labels = {name: ClassLabel(names=[f"{name} {i}" for i in range(count)]) for name, count in names.items()}
    for split, count in (("train", 24), ("test", 8)):
        coloured(count, "img", labels).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def ptb_pos(folder: Path) -> None:
    for article in range(1, 25):
        (folder / f"wsj_{article:04}.mrg").write_text(TREE)


def pos_ewt(folder: Path) -> None:
    for split, count in (("train", 24), ("dev", 8), ("test", 8)):
        (folder / f"en_ewt-ud-{split}.conllu").write_text(CONLLU * count)


def sst2(folder: Path) -> None:
    """As in GLUE: sentences with quotes of their own, no labels in the test."""
    rows = [f'a "great film number {i} , not n/a\t1\n' if i % 2 else f"dull {i}\t0\n" for i in range(24)]
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + "".join(rows[:8]))
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(f"{i}\tunknown {i}\n" for i in range(8)))


def energy_efficiency(folder: Path) -> None:
    """As UCI's file: names in the first row, empty rows and columns after the table."""
    from openpyxl import Workbook

    values = np.random.default_rng(0).uniform(0, 40, (40, 10)).round(2)
    book = Workbook()
    book.active.append([f"X{i}" for i in range(1, 9)] + ["Y1", "Y2"])
    for row in values.tolist():
        book.active.append(row)
    book.active.cell(60, 13).number_format = "0.0"  # makes the sheet larger than the table
    book.save(folder / "ENB2012_data.xlsx")


def california_housing(folder: Path) -> None:
    first = "-122.230000,37.880000,41.000000,880.000000,129.000000,322.000000,126.000000,8.325200,452600.000000\n"
    values = np.random.default_rng(0).uniform(1, 1000, (39, 9))
    lines = [",".join(f"{value:.6f}" for value in row) + "\n" for row in values]
    with gzip.open(folder / "cal_housing.data.gz", "wt") as file:
        file.writelines([first, *lines])


# recipe: its data as it comes, and the folder of real rows, if there is one
MADE = {
    "mnist": (mnist, "mnist"),
    "fashion_mnist": (fashion_mnist, "fashion_mnist"),
    "svhn": (svhn, None),
    "cifar10": (cifar10, "cifar10"),
    "cifar100": (cifar100, "cifar100_subset"),
    "ptb_pos": (ptb_pos, None),
    "pos_ewt": (pos_ewt, "ud_english_ewt"),
    "sst2": (sst2, "sst2"),
    "energy_efficiency": (energy_efficiency, "energy_efficiency"),
    "california_housing": (california_housing, "california_housing"),
}
