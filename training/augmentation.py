"""What training sees of an image: crops, flips, MixUp, CutMix, smoothed labels.

The draws of an image hang on the seed, the epoch and the row alone, never on the global random state: every variant
sees the same images, and so does a run that goes on after a break.
"""

import numpy as np
import torch
from torchvision.transforms import v2
from transformers import TrainerCallback


def evaluation_transform(size: int, mean: list[float], std: list[float]) -> v2.Compose:
    """uint8 (channels, height, width) -> float32 (channels, size, size), standardised."""
    return v2.Compose([*fit(size), *to_numbers(mean, std)])


def training_transform(size: int, mean: list[float], std: list[float], padding: int, flip: bool) -> v2.Compose:
    draws = [v2.RandomCrop(size, padding=padding)] if padding else []
    draws += [v2.RandomHorizontalFlip()] if flip else []
    return v2.Compose([*fit(size), *draws, *to_numbers(mean, std)])


def fit(size: int) -> list[v2.Transform]:
    """The shorter side to `size`, the middle of the longer one; nothing happens to an image of that size."""
    return [v2.Resize(size, antialias=True), v2.CenterCrop(size)]


def to_numbers(mean: list[float], std: list[float]) -> list[v2.Transform]:
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


class AugmentedRows(torch.utils.data.Dataset):
    """`rows` with each image drawn anew every epoch; `draw` is the seed of what a batch draws on top (MixUp)."""

    def __init__(self, rows, decode, transform, seed: int) -> None:
        self.rows, self.decode, self.transform, self.seed, self.epoch = rows, decode, transform, seed, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        draw = int(np.random.SeedSequence([self.seed, self.epoch, index]).generate_state(1)[0])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw)
            image = self.transform(self.decode(row))
        return {"pixel_values": image, "labels": row["labels"], "draw": draw}


class EpochCallback(TrainerCallback):
    """Tells the rows which epoch it is; the data loader of a distributed run does not."""

    def __init__(self, rows: AugmentedRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.rows.epoch = int((state.epoch or 0) + 1e-6)  # within an epoch after a break


class ImageCollator:
    """Rows -> `pixel_values` (batch, channels, height, width) and `labels`.

    Labels are class indices (batch,); those of augmented rows become targets (batch, classes), mixed and smoothed.
    """

    def __init__(self, classes: int, mixup: float = 0.0, cutmix: float = 0.0, smoothing: float = 0.0) -> None:
        from timm.data import Mixup

        self.classes, self.smoothing = classes, smoothing
        options = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "label_smoothing": smoothing, "num_classes": classes}
        self.mixup = Mixup(**options) if mixup > 0 or cutmix > 0 else None

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        images = torch.stack([row["pixel_values"] for row in rows])
        labels = torch.tensor([row["labels"] for row in rows])
        if "draw" in rows[0]:
            images, labels = self.mix(images, labels, rows[0]["draw"])
        return {"pixel_values": images, "labels": labels}

    def mix(self, images: torch.Tensor, labels: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        from timm.data.mixup import mixup_target

        if self.mixup is None:
            return images, mixup_target(labels, self.classes, smoothing=self.smoothing)
        state = np.random.get_state()  # timm draws from it
        np.random.seed(draw)
        pairs = len(images) // 2 * 2  # an image without a partner stays as it is
        alone = mixup_target(labels[pairs:], self.classes, smoothing=self.smoothing)
        mixed, targets = self.mixup(images[:pairs], labels[:pairs]) if pairs else (images[:0], alone[:0])
        np.random.set_state(state)
        return torch.cat([mixed, images[pairs:]]), torch.cat([targets, alone])
