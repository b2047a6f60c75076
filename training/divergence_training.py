"""One training run of `affine_divergence.py`: the images, the nets with their corrections, plain SGD."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_autonorm import patch

HUB_ID = "uoft-cs/cifar10"
CLASSES = 10
CHANNELS, SIZE = 3, 32

# `norm_like_half` is norm-like, too; what differs is its learning rate.
FORMS = {"norm_like": "norm_like", "norm_like_half": "norm_like", "affine_like": "affine_like"}
METHODS = ("none", "batch_norm", "layer_norm", "rms_norm", *FORMS)
ACTIVATIONS = {"tanh": nn.Tanh, "leaky_relu": nn.LeakyReLU}


@dataclass(frozen=True)
class Run:
    """Every setting of a run; with the same ones it gives the same numbers."""

    family: str  # fc, conv
    activation: str
    method: str
    width: int  # hidden units of an fc net; channels of the first convolution of a conv net, doubled after it
    depth: int  # hidden layers
    batch_size: int
    lr: float
    seed: int
    epochs: int
    train_images: int
    validation_images: int
    test_images: int
    data: str


@dataclass
class Images:
    """uint8 images (n, 3, 32, 32) and int64 labels (n,) by split, and what they were drawn from."""

    source: tuple
    splits: dict[str, tuple[Tensor, Tensor]]

    def to_float(self, device: str) -> dict[str, tuple[Tensor, Tensor]]:
        """fp32 images, each channel with mean 0 and variance 1 over the training images."""
        pixels = self.splits["train"][0].float()
        mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
        return {
            name: (((images.float() - mean) / std).to(device), labels.to(device))
            for name, (images, labels) in self.splits.items()
        }


def load_images(data_dir: str | None, counts: dict[str, int], cache: Path) -> Images:
    """The first rows of CIFAR-10 in a fixed random order, decoded once and kept in the file `cache`.

    counts: how many images `train`, `validation` (both from the training split) and `test` get.
    """
    source = (data_dir or HUB_ID, *counts.items())
    if cache.is_file():
        stored = torch.load(cache)
        if tuple(stored["source"]) == source:
            return Images(source, stored["splits"])
    from datasets import load_dataset

    rows = load_dataset(data_dir or HUB_ID)
    splits = {}
    for name, wanted in (("train", counts["train"] + counts["validation"]), ("test", counts["test"])):
        split = rows[name]
        if not {"img", "label"} <= set(split.column_names):
            raise ValueError(f"{source[0]} has the columns {split.column_names}; CIFAR-10 has 'img' and 'label'.")
        if len(split) < wanted:
            raise ValueError(f"{source[0]} has {len(split)} {name} rows, {wanted} are needed; take a smaller --scale.")
        split = split.shuffle(seed=0).select(range(wanted))
        pixels = np.stack([np.asarray(image.convert("RGB")) for image in split["img"]])
        splits[name] = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(list(split["label"]))
    images, labels = splits["train"]
    cut = counts["train"]
    splits = {
        "train": (images[:cut], labels[:cut]),
        "validation": (images[cut:], labels[cut:]),
        "test": splits["test"],
    }
    half_written = cache.with_suffix(".tmp")
    torch.save({"source": source, "splits": splits}, half_written)
    os.replace(half_written, cache)
    return Images(source, splits)


def affine_maps(run: Run) -> list[tuple[tuple[int, ...], nn.Module]]:
    """The affine maps of a net from the first to the output layer, each with the shape of its input."""
    maps = []
    shape: tuple[int, ...] = (CHANNELS, SIZE, SIZE) if run.family == "conv" else (CHANNELS * SIZE**2,)
    for index in range(run.depth):
        if run.family == "conv":
            channels = run.width * (1 if index == 0 else 2)
            maps.append((shape, nn.Conv2d(shape[0], channels, 3, stride=2, padding=1)))
            shape = (channels, math.ceil(shape[1] / 2), math.ceil(shape[2] / 2))
        else:
            maps.append((shape, nn.Linear(shape[0], run.width)))
            shape = (run.width,)
    flat = (math.prod(shape),)
    return [*maps, (flat, nn.Linear(*flat, CLASSES))]


def normaliser(method: str, shape: tuple[int, ...]) -> list[nn.Module]:
    """What stands before an affine map with input of `shape`; without learnable gains."""
    if method == "batch_norm":
        return [(nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(shape[0], affine=False)]
    if method == "layer_norm":
        return [nn.LayerNorm(shape, elementwise_affine=False)]
    if method == "rms_norm":
        return [nn.RMSNorm(shape, elementwise_affine=False)]
    return []


def build_net(run: Run) -> nn.Sequential:
    """Takes images (n, 3, 32, 32), gives logits (n, 10). The same seed gives every method the same weights."""
    torch.manual_seed(run.seed)
    layers: list[nn.Module] = []
    maps = affine_maps(run)
    for index, (shape, affine) in enumerate(maps):
        is_output = index == len(maps) - 1
        # The usual start of the uncorrected net. torch's own default would let the signal fade with depth.
        nn.init.kaiming_normal_(affine.weight, a=0.01, nonlinearity="linear" if is_output else run.activation)
        nn.init.zeros_(affine.bias)
        if len(shape) == 1 and (is_output or index == 0):
            layers.append(nn.Flatten())
        layers += [*normaliser(run.method, shape), affine]
        if not is_output:
            layers.append(ACTIVATIONS[run.activation]())
    net = nn.Sequential(*layers)
    if run.method in FORMS:
        form = FORMS[run.method]
        net = patch(net, None, linear=form, conv=form if run.family == "conv" else None)
    return net


def train(run: Run, data: dict[str, tuple[Tensor, Tensor]]) -> dict:
    """The outcome: accuracies after the last epoch; those of chance where the loss or a logit was not finite."""
    start = time.perf_counter()
    images, labels = data["train"]
    net = build_net(run).to(images.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=run.lr)
    order = torch.Generator().manual_seed(run.seed)  # of its own, so that every method sees the same batches
    loss_of_epoch = math.nan
    for _ in range(run.epochs):
        total = torch.zeros((), device=images.device)
        for chosen in torch.randperm(len(images), generator=order).to(images.device).split(run.batch_size):
            loss = F.cross_entropy(net(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(chosen)
        loss_of_epoch = total.item() / len(images)
        if not math.isfinite(loss_of_epoch):
            break
    net.eval()
    accuracies = {name: accuracy(net, *data[name]) for name in ("validation", "test")}
    diverged = not math.isfinite(loss_of_epoch) or None in accuracies.values()
    if diverged:
        accuracies = dict.fromkeys(accuracies, 1 / CLASSES)
    return {
        **{f"{name}_accuracy": value for name, value in accuracies.items()},
        "train_loss": loss_of_epoch if math.isfinite(loss_of_epoch) else None,
        "diverged": diverged,
        "steps": run.epochs * math.ceil(len(images) / run.batch_size),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "seconds": round(time.perf_counter() - start, 3),
    }


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float | None:
    """None where a logit is not finite."""
    logits = torch.cat([net(batch) for batch in images.split(1000)])
    return (logits.argmax(1) == labels).float().mean().item() if logits.isfinite().all() else None
