"""Stock `AutoModel.from_pretrained` rebuilds a patched model, once `hf_autonorm` is imported.

transformers lets a registered quantizer change a model between its construction (on the meta device) and the loading
of the weights; that is the moment to wrap the modules that were wrapped when the model was saved.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import PatchConfig
from ..errors import CheckpointError, nearest
from ..nn.wrapper import Wrapper
from ..patching.record import QUANT_METHOD, update_record, wrappers
from ..patching.surgery import rebuild
from ..patching.targets import find_targets
from .remote import drop_auto_map, is_own_class
from .stacking import stacked_quantizer


class AutoNormQuantizationConfig(QuantizationConfigMixin):
    """`config.quantization_config` of a patched model, as transformers parses it."""

    def __init__(
        self,
        patches: list[dict[str, Any]],
        version: str | None = None,
        quant_method: str = QUANT_METHOD,
        stacked: Any = None,
        stacked_pre_quantized: bool = False,
    ) -> None:
        self.quant_method, self.version, self.patches = quant_method, version, patches
        self.stacked, self.stacked_pre_quantized = stacked, stacked_pre_quantized  # see `stacking`

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        unknown = set(config_dict) - {"quant_method", "version", "patches", "stacked", "stacked_pre_quantized"}
        if unknown or "patches" not in config_dict:
            raise CheckpointError(
                f"the patch record in config.json has the keys {sorted(config_dict)}; expected quant_method, version "
                "and patches. It was written by another version of hf_autonorm, or by hand"
            )
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


class AutoNormQuantizer(HfQuantizer):
    """Wraps the recorded modules before the weights are loaded; checks, after it, that every new tensor was loaded."""

    is_trainable = True

    def __new__(cls, config: AutoNormQuantizationConfig, **kwargs: Any):
        if config.stacked is None:
            return super().__new__(cls)
        return stacked_quantizer(config.patches, config.stacked, config.stacked_pre_quantized)

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise CheckpointError(
                "quantization_config says `autonorm`, but the checkpoint is not a patched one. Load it without, then "
                "call patch(model)"
            )

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        rebuild_recorded(model, self.quantization_config.patches)

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> None:
        # Not super(): the flags it sets say "quantised", and then `.half()` and Trainer refuse the model.
        for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
            model.__dict__.pop(attribute, None)
        for module in model.modules():
            config = module.__dict__.get("config")
            if isinstance(config, PreTrainedConfig):
                config.__dict__.pop("_is_quantized", None)
        finish(model)


def rebuild_recorded(model: nn.Module, patches: list[dict[str, Any]]) -> None:
    """Wraps the recorded modules of a skeleton, and notes the shapes of what is to be loaded."""
    rebuild(model, resolve_patches(model, patches))
    for _, wrapper in wrappers(model):
        wrapper._expected_shapes = {name: t.shape for name, t in added_tensors(wrapper).items()}


def finish(model: nn.Module) -> None:
    """After the weights are loaded: all there, Python's copies of the scalars renewed, the config in order."""
    require_loaded(model)
    for _, wrapper in wrappers(model):
        wrapper._sync_scalars()
    update_record(model)
    if not is_own_class(type(model)):
        drop_auto_map(model.config)


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"spec", "modules"}
        and isinstance(entry["spec"], dict)
        and isinstance(entry["modules"], list)
        and all(isinstance(name, str) for name in entry["modules"])
    )


def resolve_patches(model: nn.Module, patches: list[dict[str, Any]]) -> list[tuple[PatchConfig, list[str]]]:
    """The record's settings with the names as `model` has them.

    A base model loads the checkpoint of a headed one and the other way round: names are mapped through
    `base_model_prefix`; those of another class's head are passed over, as transformers passes over its weights.

    Raises CheckpointError where a name is in no way this model's.
    """
    if not isinstance(patches, list) or not all(map(_is_entry, patches)):
        raise CheckpointError(
            'the "patches" of a patch record must be a list of {"spec": settings, "modules": names}. The record was '
            "written by another version of hf_autonorm, or by hand"
        )
    resolved = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in patches:
        config = PatchConfig.from_dict(entry["spec"])
        found = find_targets(model, config.replace(include=None, exclude=None), skeleton=True)
        candidates = {name: target for target in found for name in target.names}
        names = []
        for name in entry["modules"]:
            own = _own_name(model, modules, name)
            if own is None:
                continue
            target = candidates.get(own)
            if target is None or target.reason is not None:
                why = "it is no candidate" if target is None else target.reason
                raise CheckpointError(
                    f"the checkpoint's patch names {name!r}, not to be wrapped in this {type(model).__name__}: {why}"
                )
            names.append(own)
        resolved.append((config, names))
    if patches and not any(names for _, names in resolved):
        _refuse_unrelated(model)
    return resolved


def _own_name(model: nn.Module, modules: dict[str, nn.Module], name: str) -> str | None:
    """`name` as this model, which has these modules, calls it; None where it belongs to another class's head."""
    prefix = getattr(model, "base_model_prefix", "")
    stripped = name.removeprefix(prefix + ".") if prefix else name
    for candidate in (name, stripped, f"{prefix}.{name}" if prefix else name):
        if candidate in modules:
            return candidate
    saved_as = (getattr(getattr(model, "config", None), "architectures", None) or [None])[0]
    of_other_class = saved_as is not None and saved_as != type(model).__name__
    if of_other_class and name == stripped and name.split(".")[0] not in modules:
        return None
    raise CheckpointError(
        f"the checkpoint's patch names the module {name!r}, which this {type(model).__name__} lacks; "
        f"{nearest(name, modules)}. Was the config edited, or is it another architecture's?"
    )


def _refuse_unrelated(model: nn.Module) -> None:
    """None of the recorded modules is in this model: another class's head was patched alone, or it is unrelated."""
    saved_as = (getattr(getattr(model, "config", None), "architectures", None) or [None])[0]
    saved_class = getattr(transformers, saved_as or "", None)
    if getattr(saved_class, "config_class", None) is not getattr(model, "config_class", None):
        raise CheckpointError(
            f"this is the checkpoint of a patched {saved_as}, and {type(model).__name__} has none of the modules "
            "patched in it; load it with its own class or through an AutoModel class"
        )


def require_loaded(model: nn.Module) -> None:
    """Raises CheckpointError where a tensor that the patch added was not in the checkpoint: transformers would leave
    uninitialised memory there."""
    from transformers.modeling_utils import is_fsdp_enabled, is_local_dist_rank_0

    if is_fsdp_enabled() and not is_local_dist_rank_0():
        return  # rank 0 reads the file and broadcasts
    missing = []
    for name, wrapper in wrappers(model):
        expected = wrapper.__dict__.pop("_expected_shapes", {})
        for own_name, tensor in added_tensors(wrapper).items():
            if not getattr(tensor, "_is_hf_initialized", False):
                missing.append(f"{name}.{own_name}")
            elif tensor.shape != expected.get(own_name, tensor.shape):  # transformers 5.0 takes tensors of any size
                raise CheckpointError(
                    f"{name}.{own_name} has the shape {tuple(tensor.shape)} in the checkpoint, by its patch record "
                    f"{tuple(expected[own_name])}: they belong to different patches"
                )
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the patch are not in the checkpoint: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}. It is not the checkpoint of a patched model, or of another "
            "version: load it unpatched (delete quantization_config from its config.json) and call patch(model)"
        )


def added_tensors(wrapper: Wrapper) -> dict[str, torch.Tensor]:
    """The persistent tensors the patch added to one module, by their names below it."""
    inside = {id(t) for t in (*wrapper.original.parameters(), *wrapper.original.buffers())}
    state = wrapper.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if id(t) not in inside and not name.startswith("original.")}


# Statements, not decorators: the file that travels with a model has these classes too, and registers nothing for good.
register_quantization_config(QUANT_METHOD)(AutoNormQuantizationConfig)
register_quantizer(QUANT_METHOD)(AutoNormQuantizer)
