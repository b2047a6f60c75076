"""Accuracy of trained image classifiers on corrupted images: CIFAR-10-C (arXiv 1903.12261), or as near as one gets.

    python training/robustness.py --models runs/cifar10/ln-0 runs/cifar10/autonorm_s-0 --corrupted CIFAR-10-C

`--corrupted` is the folder of the published set: one `.npy` a corruption, 10,000 images for each severity from 1 to 5,
and `labels.npy`. Without it the corruptions are made here, by the library `imagecorruptions` (pip install
"hf_autonorm[robustness]") from the clean test images (`--dataset_name` or `--data_dir`). Those have the severities of
ImageNet-C, which are harsher than CIFAR-10-C's, so the two are never mixed: each line says what it was measured on.

One line for each model, corruption and severity goes to `OUTPUT_DIR/accuracy.jsonl`; what is there is not measured
again. At the end it prints, and writes to `report.md`, the accuracy by corruption and the mean over all of them.
"""

import argparse
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

import numpy as np
import torch
from datasets import ClassLabel, Image
from rich.progress import Progress
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_autonorm  # noqa: F401  patched models load by the stock classes
from training.augmentation import evaluation_transform
from training.data import find_column, load_splits, three_splits, with_class_labels
from training.records import drop_torn_line, read_records, write_whole
from training.tasks.image_classification import processor_settings

SEVERITIES = (1, 2, 3, 4, 5)
PUBLISHED, MADE = "CIFAR-10-C", "made by imagecorruptions, severities of ImageNet-C"


def main(argv: list[str] | None = None) -> Path:
    """Returns the report's path."""
    args = parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "accuracy.jsonl"
    source = PUBLISHED if args.corrupted else MADE
    data = Path(args.data_dir).resolve().name if args.data_dir else args.dataset_name
    drop_torn_line(path)
    done = {key_of(record) for record in read_records(path)}
    models = {name: load(name) for name in args.models}
    names = corruptions(args)
    with Progress() as progress, path.open("a", encoding="utf-8") as file:
        bar = progress.add_task("corruptions", total=1 + len(names) * len(SEVERITIES))
        for corruption, severity, images, labels in image_sets(args, names, done, (source, data)):
            for name, (model, transform) in models.items():
                record = {
                    "model": name,
                    "source": source,
                    "data": data,
                    "corruption": corruption,
                    "severity": severity,
                }
                record |= {"asked": args.max_images}
                if key_of(record) not in done:
                    score = accuracy(model, transform, images, labels, args.batch_size)
                    file.write(json.dumps(record | {"images": len(labels), "accuracy": score}) + "\n")
                    file.flush()
            progress.advance(bar)
    return write_report(read_records(path), args.output_dir)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="folders or Hub ids of image classifiers")
    parser.add_argument("--corrupted", type=Path, help="the folder of CIFAR-10-C")
    parser.add_argument("--dataset_name", default="uoft-cs/cifar10", help="Hub id of the clean images")
    parser.add_argument("--dataset_config", help="configuration of that dataset")
    parser.add_argument("--data_dir", help="a local folder with the clean images, used instead")
    parser.add_argument("--image_column", default="img", help="column of the image")
    parser.add_argument("--label_column", default="label", help="column of the label")
    parser.add_argument("--max_images", type=int, help="the first so many of each set")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/robustness"))
    args = parser.parse_args(argv)
    if args.max_images is not None and args.max_images < 1:
        raise ValueError(f"--max_images {args.max_images}: at least 1.")
    if args.corrupted and not (args.corrupted / "labels.npy").is_file():
        raise ValueError(f"{args.corrupted} is no CIFAR-10-C folder: it holds no labels.npy.")
    return args


def key_of(record: dict) -> tuple:
    return tuple(record[name] for name in ("model", "source", "data", "corruption", "severity", "asked"))


def load(name: str):
    """(model in eval mode, uint8 images -> its inputs)"""
    settings = processor_settings(AutoImageProcessor.from_pretrained(name), name)
    model = AutoModelForImageClassification.from_pretrained(name, dtype=torch.float32).eval()
    return model, evaluation_transform(settings["size"], settings["mean"], settings["std"])


def corruptions(args: argparse.Namespace) -> list[str]:
    if args.corrupted:
        return sorted(file.stem for file in args.corrupted.glob("*.npy") if file.stem != "labels")
    try:
        from imagecorruptions import get_corruption_names
    except ModuleNotFoundError:
        raise ValueError(
            'Give the folder of CIFAR-10-C by --corrupted, or: pip install "hf_autonorm[robustness]"'
        ) from None
    return get_corruption_names("all")


def image_sets(args, names, done, source) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """(corruption, severity, uint8 images (n, height, width, 3), labels (n,)); first the clean ones, as severity 0."""
    clean, labels = clean_images(args)
    yield "clean", 0, clean, labels
    if args.corrupted:
        labels = np.load(args.corrupted / "labels.npy")
    for corruption in names:
        # Mapped into memory: one file is 150 MB.
        published = np.load(args.corrupted / f"{corruption}.npy", mmap_mode="r") if args.corrupted else None
        for severity in SEVERITIES:
            asked = [(name, *source, corruption, severity, args.max_images) for name in args.models]
            if done.issuperset(asked):
                yield corruption, severity, clean[:0], labels[:0]
            elif published is None:
                yield corruption, severity, corrupted(clean, corruption, severity), labels
            else:
                size = len(published) // len(SEVERITIES)
                part = slice((severity - 1) * size, (severity - 1) * size + min(size, args.max_images or size))
                yield corruption, severity, np.asarray(published[part]), labels[part]


def clean_images(args) -> tuple[np.ndarray, np.ndarray]:
    """The test split of a training run on the same data, its labels numbered as there."""
    splits = load_splits(args)
    image = find_column(splits, args.image_column, "image_column", Image)
    label = find_column(splits, args.label_column, "label_column", ClassLabel)
    rows = with_class_labels(three_splits(splits, label), label)["test"]
    rows = rows.select(range(min(args.max_images or len(rows), len(rows))))
    pictures = [np.asarray(picture.convert("RGB")) for picture in rows[image]]
    if sizes := {picture.shape for picture in pictures[1:]} - {pictures[0].shape}:
        raise ValueError(
            f"The images are of several sizes, {pictures[0].shape} and {sizes.pop()}; CIFAR's are of one."
        )
    return np.stack(pictures), np.asarray(rows[label])


def corrupted(images: np.ndarray, corruption: str, severity: int) -> np.ndarray:
    """The same images at every call: the library draws from numpy's global state, and some of it takes a seed."""
    from imagecorruptions import corrupt, corruption_dict

    seeded = "seed" in inspect.signature(corruption_dict[corruption]).parameters
    state = np.random.get_state()
    np.random.seed(severity)
    try:
        return np.stack(
            [
                corrupt(image, severity, corruption, **({"seed": index} if seeded else {}))
                for index, image in enumerate(images)
            ]
        )
    finally:
        np.random.set_state(state)


@torch.no_grad()
def accuracy(model, transform, images: np.ndarray, labels: np.ndarray, batch_size: int) -> float:
    right = 0
    for start in range(0, len(images), batch_size):
        pixels = torch.from_numpy(images[start : start + batch_size].copy()).permute(0, 3, 1, 2)
        predicted = model(pixel_values=transform(pixels)).logits.argmax(-1)
        right += int((predicted.numpy() == labels[start : start + batch_size]).sum())
    return right / len(images)


def write_report(records: list[dict], folder: Path) -> Path:
    scores: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        scores[record["source"], record["data"], record["asked"]][record["model"], record["corruption"]].append(
            record["accuracy"]
        )
    lines = ["# Accuracy on corrupted images", ""]
    for (source, data, asked), table in scores.items():
        models = list(dict.fromkeys(model for model, _ in table))
        names = [name for name in dict.fromkeys(name for _, name in table) if name != "clean"]
        lines += [f"Images: {data}, {source}; {asked or 'all'} of each set; mean over the severities 1 to 5.", ""]
        lines += [f"| corruption | {' | '.join(f'`{model}`' for model in models)} |", "|---|" + "---:|" * len(models)]
        means = {(model, name): mean(values) for (model, name), values in table.items()}
        rows = {"clean": "clean images"} | {name: name for name in names}
        for name, shown in rows.items():
            lines.append(f"| {shown} | " + " | ".join(_number(means.get((model, name))) for model in models) + " |")
        overall = [[means[model, name] for name in names if (model, name) in means] for model in models]
        lines += [
            f"| **mean of all corruptions** | {' | '.join(_number(mean(o) if o else None) for o in overall)} |",
            "",
        ]
    path = folder / "report.md"
    write_whole(path, "\n".join(lines))
    return path


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    print(main().read_text(encoding="utf-8"))
