"""The class of an image, grey or coloured.

Data: an image and a label column, in Hub datasets or local files (idx files, folders of PNGs, parquet, arrow). Splits
where not all three are published: `three_splits`, by seed 0. Images are decoded once, at their own size or, where
they are larger, at the model's, and kept as raw bytes in the cache of `datasets`; what is random is drawn when a row
is read.
"""

import numpy as np
import torch
from datasets import Image
from PIL.Image import Resampling
from transformers import AutoImageProcessor, AutoModelForImageClassification

from training.augmentation import (
    AugmentedRows,
    EpochCallback,
    ImageCollator,
    evaluation_transform,
    training_transform,
)
from training.data import dataset_card, find_column, load_splits, three_splits, with_class_labels
from training.losses import cross_entropy
from training.metrics import classification_scorer
from training.models import class_names, hub_id, resolve_model
from training.tasks import Task, take

LOOKED_AT = 64  # training images; among coloured ones some are grey


def load(args, training_args) -> Task:
    splits = load_splits(args)
    image = find_column(splits, args.image_column, "image_column", Image)
    label = find_column(splits, args.label_column or "label", "label_column")
    splits = with_class_labels(three_splits(splits, label).select_columns([image, label]), label)
    names = splits["train"].features[label].names
    splits = take(splits, args.max_train_samples, args.max_eval_samples)

    model, processor, settings = load_model(args, names, splits["train"][:LOOKED_AT][image])
    splits = splits.map(
        pixel_reader(image, label, settings["channels"], settings["size"]),
        batched=True,
        remove_columns=splits["train"].column_names,
        num_proc=args.preprocessing_num_workers,
        desc="Reading images",
    )
    numbers = settings["size"], settings["mean"], settings["std"]
    show = evaluation_transform(*numbers)

    def evaluated(batch):
        rows = [dict(zip(batch, values)) for values in zip(*batch.values())]
        return {"pixel_values": [show(decoded(row)) for row in rows], "labels": batch["labels"]}

    augmented = AugmentedRows(
        splits["train"],
        decoded,
        training_transform(*numbers, padding=args.random_crop, flip=args.random_flip),
        seed=training_args.seed,
    )
    training_args.remove_unused_columns = False  # what the model reads is made when a row is read
    return Task(
        model=model,
        processing_class=processor,
        splits=splits.with_transform(evaluated),
        data_collator=ImageCollator(len(names), args.mixup, args.cutmix, training_args.label_smoothing_factor),
        compute_metrics=classification_scorer(),
        dataset=dataset_card(args),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        augmented=augmented,
        compute_loss=cross_entropy(),
        callbacks=[EpochCallback(augmented)],
    )


def load_model(args, names: list[str], examples: list) -> tuple:
    """The model, its image processor, and that one's size (pixels), channels, mean and std of values in [0, 1]."""
    if args.model_name_or_path == "vit_lite":
        from training.models.vit_lite import vit_lite

        channels = 1 if all(example.mode in ("1", "L") for example in examples) else 3
        size, half = min(examples[0].size), [0.5] * channels
        model = vit_lite(names, size, channels, args.config_overrides)
        return model, None, {"size": size, "channels": channels, "mean": half, "std": half}
    path = resolve_model(args.model_name_or_path, args.config_overrides)
    model = AutoModelForImageClassification.from_pretrained(
        path, dtype=torch.float32, ignore_mismatched_sizes=True, **class_names(names)
    )
    processor = AutoImageProcessor.from_pretrained(path)
    return model, processor, {"channels": 3} | processor_settings(processor, hub_id(path) or path)


def processor_settings(processor, name: str) -> dict:
    """size, mean and std, of timm's and of transformers' own processors."""
    timm_config = getattr(processor, "data_config", None)
    if timm_config is not None:
        channels, height, _ = timm_config["input_size"]
        return {"size": height, "channels": channels, "mean": timm_config["mean"], "std": timm_config["std"]}
    size = getattr(processor, "crop_size", None) or processor.size
    pixels = size.get("height") or size.get("shortest_edge")
    if pixels is None:
        raise ValueError(f"The image processor of {name} has no square size: {size}.")
    return {"size": pixels, "mean": processor.image_mean, "std": processor.image_std}


def pixel_reader(image: str, label: str, channels: int, size: int):
    def read(batch):  # a closure, for the cache: see pos_tagging.py
        arrays = []
        for picture in batch[image]:
            if picture.mode[0] in "IF":  # Pillow would cut all above 255 to white
                raise ValueError(f"An image of mode {picture.mode} has more than 8 bits a channel; bring it to 8.")
            picture = picture.convert("L" if channels == 1 else "RGB")
            if min(picture.size) > size:
                scale = size / min(picture.size)
                picture = picture.resize([round(side * scale) for side in picture.size], Resampling.BILINEAR)
            arrays.append(np.asarray(picture).reshape(picture.height, picture.width, channels))
        return {
            "pixels": [array.tobytes() for array in arrays],
            "shape": [array.shape for array in arrays],
            "labels": batch[label],
        }

    return read


def decoded(row: dict) -> torch.Tensor:
    """uint8 (channels, height, width)."""
    return torch.frombuffer(bytearray(row["pixels"]), dtype=torch.uint8).view(*row["shape"]).permute(2, 0, 1)
