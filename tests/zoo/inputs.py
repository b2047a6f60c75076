"""Dummy inputs, named by a label that `recipes.json` remembers.

A label is `case` (written by hand in `input_cases.py`), `image:VARIANT*N` or `audio:VARIANT*N` (text with N
placeholders), or `S16:input_ids=ids,pixel_values=bchw` (text of 16 tokens, one option per argument).
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig

from . import media
from .arguments import BATCH, options
from .draw import Draw
from .input_cases import CASES
from .sizes import Sizes

_MAIN = ("input_ids", "pixel_values", "input_values", "input_features")
_MASKS = [
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "pixel_attention_mask",
    "spatial_shapes",
    "pixel_position_ids",
]


def make_inputs(name: str, label: str, model: nn.Module, config: PreTrainedConfig, seed: int = 0) -> dict:
    """The keyword arguments of `model.forward` that `label` names."""
    draw = Draw(seed, label)
    arguments = forward_arguments(model)
    if label == "case":
        return _case(name, model, config)(config, draw)
    kind, _, rest = label.partition(":")
    sizes = Sizes(model, config)
    if kind in ("image", "audio"):
        variant, _, n = rest.rpartition("*")
        alone = media.variants(kind, sizes, arguments)[variant](draw)
        return media.with_text(kind, alone, int(n), sizes, arguments, draw)
    length = int(kind[1:])
    pairs = [pair.split("=") for pair in rest.split(",")]
    out = {argument: options(argument, sizes, length)[option](draw) for argument, option in pairs}
    if "input_ids" in out and "attention_mask" in arguments:
        out.setdefault("attention_mask", torch.ones_like(out["input_ids"]))
    if "input_ids" in out and "bbox" in arguments:
        out["bbox"] = draw.boxes(BATCH, length)
    return out


def forward_arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The named arguments of the forward."""
    parameters = inspect.signature(model.forward).parameters
    return {k: p for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def candidates(name: str, model: nn.Module, config: PreTrainedConfig, most: int = 60) -> Iterator[str]:
    """Labels to try, likeliest first; `most` bounds the text ones. A media label lacks its `*N`."""
    if _case(name, model, config):
        yield "case"
    sizes, arguments = Sizes(model, config), forward_arguments(model)
    required = [k for k, p in arguments.items() if p.default is p.empty]
    if "input_ids" in arguments and not required:
        for kind in media.kinds(sizes, arguments):
            yield from (f"{kind}:{variant}" for variant in media.variants(kind, sizes, arguments))
    labels = (
        f"S{length}:" + ",".join(f"{k}={v}" for k, v in zip(names, combination))
        for names in argument_sets(model, config, arguments, required)
        for length in ((16, 32, 8, 64, 128) if _is_text(names) else (16,))
        for combination in itertools.product(*(options(k, sizes, length) for k in names))
    )
    yield from itertools.islice(labels, most)


def _case(name: str, model: nn.Module, config: PreTrainedConfig) -> Callable | None:
    """The inputs written for this class, or for the part of the config that it takes, or for the model type."""
    return next((CASES[k] for k in (type(model).__name__, config.model_type, name) if k in CASES), None)


def _is_text(names: list[str]) -> bool:
    return any(n.endswith("input_ids") or n in ("inputs_embeds", "hidden_states") for n in names)


def argument_sets(model: nn.Module, config: PreTrainedConfig, arguments: Mapping, required: list) -> list[list[str]]:
    """Sets of arguments that may make a full call: what is required, the main input, and their usual company."""
    main = getattr(model, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, (list, tuple)) else main
    base = list(required)
    if main in arguments and main not in base:
        base.insert(0, main)
    if not base:
        base = [n for n in _MAIN if n in arguments][:1]
    full = base + [n for n in _company(base, main, model, config, arguments) if n not in base]
    sets = [full]
    if "decoder_input_ids" in full and "input_ids" in arguments and "input_ids" not in full:
        sets.append(full + ["input_ids"])
    if masks := [m for m in _MASKS if m in arguments and m not in full]:
        sets.append(full + masks)
    if base != full:
        sets.append(base)
    if "inputs_embeds" in arguments and not required:
        sets.append(["inputs_embeds"])
    if "encoder_hidden_states" in arguments and "encoder_hidden_states" not in full:
        sets.append(full + ["encoder_hidden_states"])
    return [s for s in sets if s]


def _company(base: list[str], main: str, model: nn.Module, config: PreTrainedConfig, arguments: Mapping) -> list[str]:
    """What goes with the main input: the text of an image, the image of a contrastive pair, a decoder's tokens."""
    out = []
    senses = ("pixel_values", "pixel_values_videos", "input_values", "input_features")
    if "input_ids" in arguments and main in senses and "decoder_input_ids" not in arguments:
        out.append("input_ids")
    if "input_ids" in base + out and main == "input_ids":
        towers = hasattr(model, "vision_model") and hasattr(model, "text_model")
        if "pixel_values" in arguments and (hasattr(model, "logit_scale") or towers):
            out.append("pixel_values")
        if "input_features" in arguments and hasattr(model, "audio_model"):
            out.append("input_features")
    if "decoder_input_ids" in arguments:
        out.append("decoder_input_ids")
    return out
