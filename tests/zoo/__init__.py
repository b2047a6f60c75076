"""Tiny randomly initialised models of every transformers model type and timm family, with inputs, without a download.

    from tests.zoo import build, build_timm, run_forward, float_outputs

    model, inputs = build("bert", head="seq_cls", seed=0)
    for path, tensor in float_outputs(run_forward(model, inputs)): ...

`build` shrinks the default config by the names of its fields (`shrink.py`, `rules.py`, `fields.py`; exceptions in
`config_cases.py`) and makes inputs from the signature of the forward (`inputs.py`, `arguments.py`, `media.py`;
exceptions in `input_cases.py`). Which strategy and which inputs work for which head is remembered in `recipes.json`;
what does not build is in `unbuilt.json`, with the reason. `python -m tests.zoo.discover` brings both up to date.
"""

from .build import UnbuiltError, build, float_outputs, run_forward, unbuilt
from .heads import heads_of, transformers_names
from .sample import Entry, every, sample
from .timm_models import build_timm, timm_names

__all__ = [
    "Entry",
    "UnbuiltError",
    "build",
    "build_timm",
    "every",
    "float_outputs",
    "heads_of",
    "run_forward",
    "sample",
    "timm_names",
    "transformers_names",
    "unbuilt",
]
