"""Build a tiny model of a transformers model type, with inputs for it; run it; read its output."""

import contextlib
import functools
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from .config_cases import SET_FOR_HEAD
from .heads import canonical_head, config_for, model_class
from .inputs import make_inputs
from .rules import STRATEGIES, Strategy
from .shrink import all_configs, small_config

HERE = Path(__file__).parent
RECIPES, UNBUILT = HERE / "recipes.json", HERE / "unbuilt.json"

# a cache, a mask drawn at random or a dropped layer would make two runs differ
_SWITCHED_OFF = {
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layerdrop": 0.0,
    "layer_drop": 0.0,
    "output_router_logits": False,
}


class UnbuiltError(LookupError):
    """The zoo has no recipe for this model; the message says why."""


def build(name: str, head: str = "base", seed: int = 0) -> tuple[nn.Module, dict]:
    """A tiny model of a transformers model type and the keyword arguments for its forward.

    fp32, CPU, eval mode. The same arguments give the same bits in any process; the caller's random state (torch,
    numpy, random) is left as it was. Zero weights and norm parameters are perturbed, so that each of them shows in
    the output. `head` is one of `heads_of(name)` or another head with the same class. Raises `UnbuiltError`.
    """
    head = canonical_head(name, head)
    recipe = recipes().get(name, {}).get(head)
    if recipe is None:
        reason = unbuilt().get((name, head), "no recipe yet: run `python -m tests.zoo.discover`")
        raise UnbuiltError(f"{name}/{head}: {reason}")
    strategy, _, label = recipe.partition("|")
    model, config = make_model(name, head, STRATEGIES[strategy], seed)
    return model, make_inputs(name, label, model, config, seed)


@functools.cache
def recipes() -> dict[str, dict[str, str]]:
    """Model type -> head -> "strategy|input label"."""
    lines = json.loads(RECIPES.read_text()) if RECIPES.exists() else {}
    return {n: {h: recipe for recipe, heads in line.items() for h in heads.split()} for n, line in lines.items()}


def unbuilt() -> dict[tuple[str, str], str]:
    """(model type, head) -> the reason why it does not build or run."""
    lines = json.loads(UNBUILT.read_text()) if UNBUILT.exists() else {}
    return {(n, h): reason for n, line in lines.items() for h, reason in line.items()}


def make_config(name: str, head: str, strategy: Strategy) -> PreTrainedConfig:
    """The small config of one head, with everything random or stateful switched off."""
    config = small_config(name, strategy)
    for key, value in SET_FOR_HEAD.get((name, head), {}).items():
        setattr(config, key, value)
    config = config_for(model_class(name, head), config)
    for c in all_configs(config):
        for key, value in _SWITCHED_OFF.items():
            if vars(c).get(key) is not None:
                setattr(c, key, value)
        if "dtype" in vars(c):
            c.dtype = torch.float32
        if head == "seq_cls" and getattr(c, "pad_token_id", 0) is None:
            c.pad_token_id = 0  # decoders find the last token of a row by it
    return config


def make_model(name: str, head: str, strategy: Strategy, seed: int = 0) -> tuple[nn.Module, PreTrainedConfig]:
    """The model and its config."""
    with isolated_random_state(seed), quiet(), uninitialised_as_nan():
        config = make_config(name, head, strategy)
        model = model_class(name, head)._from_config(config, dtype=torch.float32).float().eval()
    perturb(model, seed)
    return model, config


@contextlib.contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seeds torch, numpy and random inside, and gives the caller's states back."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextlib.contextmanager
def uninitialised_as_nan() -> Iterator[None]:
    """Some models leave `torch.empty` parameters as they are; as NaN they can be told and drawn by `perturb`."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the warnings about odd little configs off the test report."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Draws what was left uninitialised, and moves zeros and norm parameters a little off their start.

    A zero bias or gate hides what comes before it, and a patch that drops a norm's weight of ones would not show.
    """
    generator = torch.Generator().manual_seed(seed + 7)

    def noise(t: torch.Tensor, scale: float) -> torch.Tensor:
        return (scale * torch.randn(t.shape, generator=generator)).to(t.dtype)

    for tensor in (t for ts in (model.parameters(), model.buffers()) for t in ts if t.is_floating_point()):
        wild = isinstance(tensor, nn.Parameter) and not (tensor.abs() <= 1e6).all()
        if wild or tensor.isnan().any():
            tensor.copy_(noise(tensor, 0.02))
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.copy_(noise(parameter, 0.02))
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1 and parameter.is_floating_point():
                    parameter.add_(noise(parameter, 0.05))


def run_forward(model: nn.Module, inputs: dict, seed: int = 0) -> object:
    """The output for copies of the inputs, without gradients, under its own random state."""
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with isolated_random_state(seed), quiet(), torch.no_grad():
        return model(**copies)


def float_outputs(output: object, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every floating-point tensor in a model output, with its path; caches are left out."""
    if isinstance(output, torch.Tensor):
        return [(path, output)] if output.is_floating_point() else []
    if isinstance(output, dict):
        items = output.items()
    elif isinstance(output, (list, tuple)):
        items = enumerate(output)
    elif type(output).__module__.startswith("transformers") and "Cache" not in type(output).__name__:
        containers = (torch.Tensor, dict, list, tuple)
        items = [(k, v) for k, v in getattr(output, "__dict__", {}).items() if isinstance(v, containers)]
    else:
        return []
    return [pair for k, v in items for pair in float_outputs(v, f"{path}.{k}" if path else str(k))]
