"""Small timm models: the smallest of every model file, then the smallest for each norm class not yet among them.

    python -m tests.zoo.timm_models     # choose again, over all architectures of the installed timm; a few minutes

`timm_models.json` keeps the choice with the arguments that make each model small and its input shape.
"""

import collections
import functools
import inspect
import json
from pathlib import Path

import timm
import torch
from torch import nn

from .build import isolated_random_state, perturb, quiet, uninitialised_as_nan
from .draw import Draw

CHOICE = Path(__file__).parent / "timm_models.json"
MOST_PARAMETERS = 60_000_000

# arguments that make a large model small: the first set that its family takes
_SMALLER = (
    {"depth": 2, "embed_dim": 96, "num_heads": 4, "img_size": 224},
    {"depth": 2, "embed_dim": 96, "num_heads": 4},
    {"depth": 2, "img_size": 224},
    {"depth": 2},
    {"depths": (1, 1, 2, 1), "img_size": 224},
    {"depths": (1, 1, 2, 1)},
    {"channel_multiplier": 0.25},
    {"img_size": 256},
    {},
)
_OWN_ARGUMENTS = {
    "gemma4_vit_167m": {"depth": 2, "embed_dim": 96, "num_heads": 4},
    "samvit_base_patch16": {
        "depth": 2,
        "embed_dim": 96,
        "num_heads": 4,
        "img_size": 256,
        "global_attn_indexes": (1,),
    },
    "sam2_hiera_tiny": {"img_size": 224},
    "vgg11": {},
    "convmixer_768_32": {"depth": 2},
}
# classes named after a norm that only wrap one
_WRAPPERS = ("Conv", "Linear", "Mlp", "Head", "Block", "Net", "Cell", "Downsample", "Stage", "Embed")


def timm_names() -> list[str]:
    """The chosen architectures."""
    return list(_choice())


def build_timm(name: str, seed: int = 0) -> tuple[nn.Module, dict]:
    """A small timm model and the keyword arguments for its forward; promises as `build`. A `timm/` prefix is fine."""
    name = name.removeprefix("timm/")
    if name not in _choice():
        raise LookupError(f"{name!r} is not among the {len(_choice())} timm models of the zoo")
    arguments, size = _choice()[name]["arguments"], _choice()[name]["input_size"]
    with isolated_random_state(seed), quiet(), uninitialised_as_nan():
        model = timm.create_model(name, pretrained=False, **arguments).float().eval()
    perturb(model, seed)
    first = next(iter(inspect.signature(model.forward).parameters))
    return model, {first: Draw(seed, name).normal(2, *size)}


@functools.cache
def _choice() -> dict[str, dict]:
    return json.loads(CHOICE.read_text())


def choose() -> dict[str, dict]:
    """The choice, made afresh. Architectures with pretrained weights come first: they are what users patch."""
    by_file = collections.defaultdict(list)
    norms: dict[str, set[str]] = {}
    side: dict[str, int] = {}
    for name in timm.list_models():
        try:
            with torch.device("meta"), quiet():
                model = timm.create_model(name, pretrained=False)
        except Exception:  # noqa: BLE001, S112 (needs an extra package or data)
            continue
        n = sum(p.numel() for p in model.parameters())
        file = timm.model_entrypoint(name).__module__
        by_file[file].append((not timm.is_model_pretrained(name), n, name))
        side[name] = ((model.pretrained_cfg or {}).get("input_size") or (224,))[-1]
        norms[name] = {f"{type(m).__module__}.{type(m).__name__}" for m in model.modules() if _is_leaf_norm(type(m))}
    chosen = [min(rows) for _, rows in sorted(by_file.items())]
    seen = set().union(*(norms[name] for _, _, name in chosen))
    for row in sorted((row for rows in by_file.values() for row in rows), key=lambda row: row[1]):
        if norms[row[2]] - seen:
            chosen.append(row)
            seen |= norms[row[2]]
    return {name: _made_small(name, n, side[name]) for _, n, name in chosen}


def _is_leaf_norm(cls: type) -> bool:
    return "norm" in cls.__name__.lower() and not any(w in cls.__name__ for w in _WRAPPERS)


def _made_small(name: str, n: int, side: int) -> dict:
    """The arguments and the input shape of an architecture of `n` parameters for images of `side` pixels."""
    small = n < 30e6 and side <= 400 and name not in _OWN_ARGUMENTS
    for arguments in [{}] if small else [_OWN_ARGUMENTS.get(name, {"": None}), *_SMALLER]:
        try:
            with torch.device("cpu" if small else "meta"), quiet():
                model = timm.create_model(name, pretrained=False, **arguments)
        except Exception:  # noqa: BLE001, S112 (its family does not take these arguments)
            continue
        if sum(p.numel() for p in model.parameters()) <= MOST_PARAMETERS or not arguments:
            break
    config = model.pretrained_cfg or {}
    size = tuple(config.get("input_size") or (3, 224, 224))
    if "img_size" in arguments:
        size = (size[0], arguments["img_size"], arguments["img_size"])
    elif not config.get("fixed_input_size", False):
        size = tuple(config.get("min_input_size") or size)
        size = size if size[-1] <= 256 else (size[0], 256, 256)
    return {"arguments": arguments, "input_size": size}


if __name__ == "__main__":
    CHOICE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in choose().items()) + "\n}\n")
