"""Another library's quantisation together with a patch: the wrapped modules are put in place first, then quantised.

transformers takes one quantizer a model. Here it is the other library's, made to wrap the recorded modules before it
does its own work; what it quantises sits inside the wrappers, as their original.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..patching.record import BESIDE, QUANT_METHOD
from .reading import read_json


def stacked_options(folder: Path, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`options` for transformers' from_pretrained, where a patched model is to be quantised or was saved quantised."""
    wanted, record = options.get("quantization_config"), config.get("quantization_config")
    pre_quantized = BESIDE in config  # the stock save_pretrained leaves them side by side
    saved = record if pre_quantized else record.get("stacked") if isinstance(record, dict) else None
    if saved is not None and wanted is not None:
        raise ConfigError(
            f"quantization_config=…: this model was saved quantised by {saved.get('quant_method')!r} already"
        )
    if pre_quantized:
        record, wanted = config[BESIDE], saved
    if wanted is None or not isinstance(record, dict) or record.get("quant_method") != QUANT_METHOD:
        return options
    from transformers import AutoConfig

    options = {name: value for name, value in options.items() if name != "quantization_config"}
    full = options.get("config") or AutoConfig.from_pretrained(folder)
    full.__dict__.pop(BESIDE, None)
    wanted = wanted if isinstance(wanted, dict) else wanted.to_dict()  # transformers prints configs as JSON
    full.quantization_config = {**record, "stacked": wanted, "stacked_pre_quantized": pre_quantized}
    return options | {"config": full}


def join_records(folder: Path) -> None:
    """Puts the other library's record in a saved config.json into ours: the stock from_pretrained knows one only."""
    config = read_json(folder / "config.json")
    if BESIDE in config and "quantization_config" in config:
        joined = {**config.pop(BESIDE), "stacked": config["quantization_config"], "stacked_pre_quantized": True}
        config["quantization_config"] = joined
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def stacked_quantizer(patches: list[dict[str, Any]], config: Any, pre_quantized: bool) -> Any:
    """The quantizer of `config` (its object or dictionary), which wraps what `patches` names first."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=pre_quantized)
    stacked: Any = object.__new__(type(f"AutoNorm{type(quantizer).__name__}", (Stacked, type(quantizer)), {}))
    stacked.__dict__.update(quantizer.__dict__, patches=patches)
    return stacked


class Stacked:
    """What a quantizer does in addition."""

    patches: list[dict[str, Any]]

    def preprocess_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        from .loading import rebuild_recorded

        rebuild_recorded(model, self.patches)
        super().preprocess_model(model, *args, **kwargs)  # type: ignore[misc]  # that of the quantizer beside it

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> Any:
        from .loading import finish

        result = super().postprocess_model(model, **kwargs)  # type: ignore[misc]
        finish(model)
        return result
