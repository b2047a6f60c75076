"""Small configs: walks a default config and its sub-configs, and passes on what `rules.py` makes of every field."""

import copy
import dataclasses
import functools
import importlib.util
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import config_cases as cases
from .fields import EXPERTS, EXPERTS_PER_TOKEN
from .layers import layers_to_keep
from .rules import (
    HEAD_DIM,
    Strategy,
    TokenIds,
    shrink_int,
    shrink_list,
    shrink_rope,
)

_INHERITED = {f.name for f in dataclasses.fields(PreTrainedConfig)}
_DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")
_DROPOUT_OF_LAYERS = {
    "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop", "encoder_layer_drop", "decoder_layer_drop",
    "mask_time_prob", "mask_feature_prob",
}  # fmt: skip


def small_config(name: str, strategy: Strategy) -> PreTrainedConfig:
    """A fresh small config of the model type `name`; the same arguments give an equal config in any process."""
    reference = cases.REFERENCE[name]() if name in cases.REFERENCE else CONFIG_MAPPING[name]()
    config = _shrink(reference, strategy, TokenIds(), name)
    if name in cases.FINISH:
        cases.FINISH[name](config)
    return config


def sub_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs that are attributes of `config`."""
    return [v for v in vars(config).values() if isinstance(v, PreTrainedConfig)]


def all_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """`config` and every config below it, depth first."""
    return [config] + [c for sub in sub_configs(config) for c in all_configs(sub)]


def _shrink(config: PreTrainedConfig, strategy: Strategy, tokens: TokenIds, name: str = "", extra: tuple = ()):
    """A small copy of `config`. `extra`: fields that only the parent's defaults pass, unknown to the class."""
    cls, fields = type(config), dict(vars(config))
    model_type, nested = getattr(config, "model_type", "") or name, not name
    keep = cases.KEEP.get(model_type, ())
    declared = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}

    chosen = _layer_choice(fields, declared or fields, strategy, tokens, keep)
    chosen |= {k: fields[k] for k in keep if k in fields}
    for k in extra:
        if declared and k not in declared and k in fields and k not in ("out_indices", "out_features", "model_type"):
            v = fields[k]
            chosen[k] = shrink_int(k, v, fields, strategy, tokens) if type(v) is int else v
    for k in declared or fields:
        if k in _INHERITED or k.startswith("_") or k not in fields or k in chosen:
            continue
        default = _default_of(declared.get(k))
        value = _field(k, fields, default, cls, strategy, tokens)
        if default is dataclasses.MISSING or value != default:
            chosen[k] = value
    if isinstance(fields.get("rope_parameters"), dict) and not strategy.shallow:
        chosen["rope_parameters"] = _rope(cls, fields, chosen, strategy)
    latent = strategy.mode == "uniform" and chosen.get("head_dim") and "v_head_dim" in fields
    if latent and fields["head_dim"] == fields.get("qk_rope_head_dim"):  # two names of the rotary width
        chosen["head_dim"] = chosen.get("qk_rope_head_dim", chosen["head_dim"])

    forced = cases.SET.get(model_type, {}) | (cases.SET_NESTED.get(model_type, {}) if nested else {})
    for k, v in forced.items():
        chosen[k] = v(chosen, fields) if callable(v) else copy.deepcopy(v)
    for k in cases.DROP.get(model_type, ()):
        chosen.pop(k, None)
    return cls(**chosen)


def _layer_choice(fields: dict, declared: dict, strategy: Strategy, tokens: TokenIds, keep: tuple) -> dict:
    """The number of layers with the lists that run along it, and the indices of a backbone's outputs."""
    name = next((n for n in _DEPTH_FIELDS if type(fields.get(n)) is int), None)
    depths = fields.get("depths")
    if name and isinstance(depths, (list, tuple)) and len(depths) == fields[name]:
        name = None  # it counts the stages
    chosen, kept = {}, []
    if name:
        kept, lists = layers_to_keep(fields, fields[name])
        chosen = lists | {name: len(kept) or shrink_int(name, fields[name], fields, strategy, tokens)}
        chosen = {k: v for k, v in chosen.items() if k in declared and k not in keep}
    outputs = fields.get("_out_indices")
    if not outputs:
        return chosen
    if not name or len(fields.get("stage_names") or ()) != fields[name] + 1:
        return chosen | {"out_indices": list(outputs)}
    depth = max(len(outputs), 2)
    if len(kept) != depth:
        chosen = {}
    return chosen | {name: depth, "out_indices": list(range(depth - len(outputs) + 1, depth + 1))}


def _default_of(field: dataclasses.Field | None) -> object:
    if field is None:
        return dataclasses.MISSING
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _field(name: str, fields: dict, default: object, cls: type, strategy: Strategy, tokens: TokenIds) -> object:
    """The value to pass for one field."""
    value = fields[name]
    if isinstance(value, PreTrainedConfig):
        spec = (getattr(cls, "sub_configs_defaults", None) or {}).get(name)
        return _shrink(value, strategy, tokens, extra=tuple(getattr(spec, "init_kwargs", None) or ()))
    if isinstance(value, (list, tuple)) and value and all(isinstance(e, PreTrainedConfig) for e in value):
        return type(value)(_shrink(e, strategy, tokens) for e in value)
    if name == "image_grid_pinpoints":
        return shrink_list(name, value, fields, strategy) if isinstance(value, (list, tuple)) else value
    if default is None and value is not None and strategy.derive and "token_i" not in name:
        return None  # __post_init__ worked it out from other fields and will do so again
    if value is None:
        if name in EXPERTS_PER_TOKEN:
            return 2
        if name in EXPERTS and "moe_intermediate_size" in fields:
            return 4
        return HEAD_DIM if name == "head_dim" and strategy.mode == "uniform" else None
    if type(value) is int:
        return shrink_int(name, value, fields, strategy, tokens)
    if isinstance(value, float) and name in _DROPOUT_OF_LAYERS:
        return 0.0
    if isinstance(value, (list, tuple)):
        return shrink_list(name, value, fields, strategy)
    return value


def _rope(cls: type, fields: dict, chosen: dict, strategy: Strategy) -> dict:
    if strategy.mode == "uniform":
        width = chosen.get("qk_rope_head_dim") or chosen.get("head_dim") or HEAD_DIM
    else:
        width = fields.get("qk_rope_head_dim") or fields.get("head_dim") or 16
        width = max(4, width // strategy.ratio) if strategy.keep_heads else width
    rope = copy.deepcopy(fields["rope_parameters"])
    if "mrope_section" not in rope and "rope_theta" in rope and "mrope_section" in _modeling_source(cls.__module__):
        rope["mrope_section"] = [8, 12, 12]  # multimodal rotary embeddings read it, the default config lacks it
    return shrink_rope(rope, width, fields.get("partial_rotary_factor"))


@functools.cache
def _modeling_source(config_module: str) -> str:
    spec = importlib.util.find_spec(config_module.replace(".configuration_", ".modeling_"))
    return Path(spec.origin).read_text() if spec and spec.origin else ""
