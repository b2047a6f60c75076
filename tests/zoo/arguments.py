"""Values for one argument of a forward: by its name, the shapes that models are known to want, likeliest first."""

import re
from collections.abc import Callable

import torch

from .draw import Draw
from .sizes import Sizes, find_int

BATCH = 2
Options = dict[str, Callable[[Draw], torch.Tensor]]

_EMBEDDINGS = [
    "inputs_embeds",
    "hidden_states",
    "query_embeds",
    "noise_embeds",
    "encoder_hidden_states",
    "context_hidden_states",
    "decoder_inputs_embeds",
    "action_embeds",
    "hidden_state",
    "queries",
    "embeddings",
]
_WAVES = ("input_values", "audio_values", "input_audio", "audio", "waveform")
_IMAGES = ("pixel_values", "prompt_pixel_values", "image", "images")


def options(name: str, sizes: Sizes, length: int) -> Options:
    """Label -> how to draw the value, for sequences of `length` tokens."""
    if re.search(r"(^|_)input_ids$", name):
        return _ids(sizes, length)
    if name.endswith("attention_mask") and name != "pixel_attention_mask":
        return {"ones": lambda d: torch.ones(BATCH, length, dtype=torch.long)}
    if name in _IMAGES:
        return _images(sizes)
    if name == "pixel_values_videos":
        return _videos(sizes)
    if name == "input_features":
        return _spectra(sizes)
    if name in _WAVES:
        return _waves(sizes)
    if name in ("past_values", "past_time_features", "past_observed_mask"):
        return _series(name, sizes)
    if name in ("input_features_mask", "feature_attention_mask"):
        return {f"m{n}": _ones(BATCH, n) for n in (64, 200, 256)}
    if name == "pixel_attention_mask":
        return {
            "bn": _ones(BATCH, max(1, sizes.side**2)),
            "bhw": _ones(BATCH, sizes.height, sizes.height),
        }
    if name in ("pixel_position_ids", "image_position_ids"):
        return {"pp": lambda d: patch_positions(sizes.side).repeat(BATCH, 1, 1)}
    h = sizes.hidden
    fixed: dict[str, Options] = {
        "grid_thw": {"thw": lambda d: torch.tensor([[1, 8, 8]])},
        "image_grid_thw": {"thw": lambda d: torch.tensor([[1, 8, 8]])},
        "merge_sizes": {"m": lambda d: torch.tensor([2])},
        "spatial_shapes": {"ss": lambda d: torch.tensor([[sizes.side, sizes.side]] * BATCH)},
        "timesteps": {"t": lambda d: d.uniform(BATCH)},
        "timestep": {"t": lambda d: d.uniform(BATCH)},
    }
    if name in fixed:
        return fixed[name]
    if name in ("latents", "codes", "audio_codes"):
        return {"bhs": _normal(BATCH, h, length), "bsh": _normal(BATCH, length, h)}
    out = {"bsh": _normal(BATCH, length, h), "sh": _normal(64, h), "bhwh": _normal(BATCH, h, 8, 8)}
    if name in _EMBEDDINGS:
        out["bhs"] = _normal(BATCH, h, length)
        out["np"] = _normal(64, sizes.channels * sizes.patch**2 * sizes.temporal)
    return out


def patch_positions(side: int) -> torch.Tensor:
    """(1, side², 2): the column and row of every patch of a square image."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([column, row], -1).reshape(1, -1, 2)


def _normal(*shape: int) -> Callable[[Draw], torch.Tensor]:
    return lambda d: d.normal(*shape)


def _ones(*shape: int) -> Callable[[Draw], torch.Tensor]:
    return lambda d: torch.ones(*shape, dtype=torch.long)


def _ids(sizes: Sizes, length: int) -> Options:
    """Plain ids; then, for the heads that ask for it, several choices or sentences that end in special tokens."""

    def ids_with(token: int, times: int) -> Callable[[Draw], torch.Tensor]:
        def draw(d: Draw) -> torch.Tensor:
            ids = d.among(sizes.plain_ids(), BATCH, length)
            ids[:, -times:] = token
            return ids

        return draw

    out: Options = {"ids": lambda d: d.among(sizes.plain_ids(), BATCH, length)}
    if "MultipleChoice" in type(sizes.model).__name__:
        out["choices"] = lambda d: d.among(sizes.plain_ids(), BATCH, 2, length)
    if "ForSequenceClassification" in type(sizes.model).__name__ and (eos := sizes.token("eos_token_id")) is not None:
        out["ids_eos"] = ids_with(eos, 1)
    if "ForQuestionAnswering" in type(sizes.model).__name__ and (sep := sizes.token("sep_token_id")) is not None:
        out["ids_sep"] = ids_with(sep, 3)
    return out


def _images(sizes: Sizes) -> Options:
    c, h, w, p = sizes.channels, sizes.height, sizes.width, sizes.patch
    n = max(1, sizes.side**2)
    out = {
        "bchw": _normal(BATCH, c, h, w),
        "btchw": _normal(BATCH, sizes.frames, c, h, h),
        "bnp": _normal(BATCH, n, c * p * p),
        "np": _normal(n, c * p * p * sizes.temporal),
        "npp": _normal(64, c, p, p),
    }
    return out | {f"bchw{s}": _normal(BATCH, c, s, s) for s in (224, 64, 32, 128, 256, 384, 448) if s != h}


def _videos(sizes: Sizes) -> Options:
    c, h, t = sizes.channels, sizes.height, max(2, sizes.frames)
    return {
        "btchw": _normal(BATCH, t, c, h, h),
        "bcthw": _normal(BATCH, c, t, h, h),
        "btchw8": _normal(BATCH, 8, c, h, h),
    }


def _spectra(sizes: Sizes) -> Options:
    mels, longest, time = sizes.mels[0], sizes.max_source, 64
    out: Options = {}
    if longest:
        out["bmt2x"] = _normal(BATCH, mels, 2 * longest)
    for m in sizes.mels:
        suffix = "" if m == mels else str(m)
        out |= {"btm" + suffix: _normal(BATCH, time, m), "bmt" + suffix: _normal(BATCH, m, time)}
    out |= {"btm200": _normal(BATCH, 200, mels), "btm256": _normal(BATCH, 256, mels)}
    out["bmt256"] = _normal(BATCH, mels, 256)
    if longest:
        out |= {"btmmx": _normal(BATCH, longest, mels), "bmtmx": _normal(BATCH, mels, longest)}
    common = {f"btm{m}": _normal(BATCH, time, m) for m in (160, 80, 128)}
    common |= {"bmt128": _normal(BATCH, 128, time), "btH": _normal(BATCH, time, sizes.hidden)}
    common["b1tm"] = _normal(BATCH, 1, 1024, 64)
    return out | {k: v for k, v in common.items() if k not in out}


def _waves(sizes: Sizes) -> Options:
    shapes = {
        "bt": (4000,),
        "b1t": (1, 4000),
        "btm": (1024, sizes.mels[0]),
        "btm64": (64, sizes.mels[0]),
        "b1t16k": (1, 16000),
        "bt16k": (16000,),
        "bt32k": (32000,),
        "b1t1920": (1, 4 * 1920),
        "bth": (16, sizes.hidden),
        "b2t": (2, 8000),
    }
    return {label: _normal(BATCH, *shape) for label, shape in shapes.items()}


def _series(name: str, sizes: Sizes) -> Options:
    context, lag, channels = sizes.history()
    if name == "past_values":
        return {"bl": _normal(BATCH, context + lag), "blc": _normal(BATCH, context + lag, channels)}
    if name == "past_observed_mask":
        return {"o": lambda d: torch.ones(BATCH, context + lag)}
    return {"t": _normal(BATCH, context + lag, find_int(sizes.config, ("num_time_features",), 0))}
