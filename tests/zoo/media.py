"""Inputs of models that splice an image or a sound into text, at placeholder tokens."""

from collections.abc import Callable, Mapping

import torch

from .arguments import patch_positions
from .draw import Draw
from .sizes import Sizes, find

Variants = dict[str, Callable[[Draw], dict[str, torch.Tensor]]]

_SOUNDS = ("input_features", "audio_features", "input_values", "audio_values", "input_audio_embeds")
_SOUND_MASKS = [
    "input_features_mask",
    "feature_attention_mask",
    "audio_attention_mask",
    "padding_mask",
    "features_mask",
]
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}


def kinds(sizes: Sizes, arguments: Mapping) -> list[str]:
    """Which media the forward takes and the vocabulary has a placeholder for."""
    takes = {"image": ("pixel_values",), "audio": ("input_features", "audio_features", "input_values")}
    return [k for k, names in takes.items() if set(names) & set(arguments) and sizes.media_token(k) is not None]


def variants(kind: str, sizes: Sizes, arguments: Mapping) -> Variants:
    """Label -> how to draw the media arguments alone, likeliest first."""
    return (_images if kind == "image" else _sounds)(sizes, arguments)


def with_text(kind: str, media: dict, n: int, sizes: Sizes, arguments: Mapping, draw: Draw) -> dict:
    """All arguments: one sentence with `n` placeholders for `media`."""
    token = sizes.media_token(kind)
    before, after = (draw.among(sizes.plain_ids(), 1, length) for length in (4, 8))
    ids = torch.cat([before, torch.full((1, n), token), after], 1)
    start = find(sizes.config, ("vision_start_token_id", "image_start_token_id")) if kind == "image" else None
    if isinstance(start, int):
        ids[0, 3] = start
    out = {"input_ids": ids, **media}
    placeholder = (ids == token).long()
    extra = {
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": placeholder * _TYPE_IDS[kind],
        "token_type_ids": placeholder,
    }
    return out | {k: v for k, v in extra.items() if k in arguments}


def _images(sizes: Sizes, arguments: Mapping) -> Variants:
    c, h, p, n = sizes.channels, sizes.height, sizes.patch, sizes.side**2
    out: Variants = {}
    grid = next((g for g in ("image_grid_thw", "grid_thw", "image_grid_hws", "image_grid_hw") if g in arguments), None)
    if grid:
        cells = torch.tensor([[1, 8, 8]] if "thw" in grid else [[8, 8]])
        shapes = {
            "grid": (64, c * sizes.temporal * p * p),
            "grid1": (64, c * p * p),
            "gridt2": (64, c * 2 * p * p),
            "gridchw": (64, c, p, p),
            "gridb": (1, 64, c, p, p),
        }
        out |= {k: lambda d, s=s: {"pixel_values": d.normal(*s), grid: cells} for k, s in shapes.items()}
    size = {"image_sizes": torch.tensor([[h, h]])} if "image_sizes" in arguments else {}
    out["nchw"] = lambda d: {"pixel_values": d.normal(1, c, h, h), **size}
    if size:
        out["nchw-"] = lambda d: {"pixel_values": d.normal(1, c, h, h)}
    out["bnchw"] = lambda d: {"pixel_values": d.normal(1, 1, c, h, h), **size}
    if "pixel_attention_mask" in arguments:
        mask = torch.ones(1, 1, h, h, dtype=torch.bool)
        out["bnchwm"] = lambda d: {"pixel_values": d.normal(1, 1, c, h, h), "pixel_attention_mask": mask}
    for tiles in (2, 3, 5):
        out[f"bnchw{tiles}"] = lambda d, t=tiles: {"pixel_values": d.normal(1, t, c, h, h), **size}
    position = next((k for k in ("pixel_position_ids", "image_position_ids") if k in arguments), None)
    if position:
        out["pos"] = lambda d: {"pixel_values": d.uniform(1, n, c * p * p), position: patch_positions(sizes.side)}
    if "spatial_shapes" in arguments:
        out["ss"] = lambda d: {
            "pixel_values": d.normal(1, n, c * p * p),
            "spatial_shapes": torch.tensor([[sizes.side, sizes.side]]),
            "pixel_attention_mask": torch.ones(1, n, dtype=torch.long),
        }
    out["np"] = lambda d: {"pixel_values": d.normal(1, n, c * p * p), **size}
    return out


def _sounds(sizes: Sizes, arguments: Mapping) -> Variants:
    mels, longest = sizes.speech_mels, 2 * sizes.speech_max_source
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"bmt2x": ((1, mels, longest), longest)} if longest else {}
    shapes |= {
        "bmt": ((1, mels, 64), 64),
        "btm": ((1, 64, mels), 64),
        "bt": ((1, 16000), 16000),
        "b1t": ((1, 1, 16000), 16000),
        "btm160": ((1, 64, 160), 64),
        "btm200": ((1, 200, mels), 200),
        "bmt200": ((1, mels, 200), 200),
        "btm560": ((1, 64, 560), 64),
    }

    def sound(name: str, shape: tuple[int, ...], length: int) -> Callable[[Draw], dict[str, torch.Tensor]]:
        fixed = {m: torch.ones(1, length, dtype=torch.long) for m in _SOUND_MASKS}
        fixed |= {m: torch.tensor([length]) for m in ("audio_feature_lengths", "input_features_lengths")}
        fixed = {k: v for k, v in fixed.items() if k in arguments}
        return lambda d: {name: d.normal(*shape), **fixed}

    return {f"{n}={k}": sound(n, *v) for n in _SOUNDS if n in arguments for k, v in shapes.items()}
