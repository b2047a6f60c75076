"""Affine-like and norm-like linears and convolutions beside the layers that they wrap."""

from __future__ import annotations

import torch
from torch import nn

from hf_autonorm.nn import AffineLike, NormLike, PatchNorm

from .timing import Section, forward, forward_backward, measure, with_fused


def linears(width: int, inner: int) -> dict[str, nn.Module]:
    return {
        "Linear": nn.Linear(width, inner),
        "AffineLike": AffineLike(nn.Linear(width, inner)),
        "NormLike": NormLike(nn.Linear(width, inner)),
    }


def convolutions(channels: int) -> dict[str, nn.Module]:
    def conv() -> nn.Module:
        return nn.Conv2d(channels, channels, 3, padding=1)

    return {
        "Conv2d 3×3": conv(),
        "PatchNorm, affine-like": PatchNorm(conv(), "affine_like"),
        "PatchNorm, norm-like": PatchNorm(conv(), "norm_like"),
    }


def run(
    seconds: float, tokens: int = 4096, width: int = 768, channels: int = 64, images: int = 32, side: int = 32
) -> dict[str, Section]:
    sections = {}
    for kind, size, layers, shape in (
        ("linears", f"{width}→{width}, {tokens} tokens", linears(width, width), (tokens, width)),
        ("linears 1:4", f"{width}→{4 * width}, {tokens} tokens", linears(width, 4 * width), (tokens, width)),
        (
            "convolutions",
            f"{channels}→{channels} channels, {images} images of {side}×{side}",
            convolutions(channels),
            (images, channels, side, side),
        ),
    ):
        generator, reference = torch.Generator().manual_seed(0), next(iter(layers))
        x = torch.randn(shape, generator=generator)
        grad = torch.randn(layers[reference](x).shape, generator=generator)
        for passes, piece in {
            "forward": lambda layer: forward(layer, x),  # noqa: B023  used up within the turn
            "forward + backward": lambda layer: forward_backward(layer, x, grad),  # noqa: B023
        }.items():
            work = {name: with_fused("auto", piece(layer)) for name, layer in layers.items()}
            title = f"{kind}, {passes}: {size}, fp32"
            sections[f"{kind}, {passes}"] = measure(title, reference, work, seconds / 6)
    return sections
