"""Which model types there are, which task heads each has, and the class of each head."""

import functools
import importlib
import inspect

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .shrink import all_configs

# the short names of the usual heads; the others are named after their Auto mapping
_SHORT = {
    "base": "MODEL",
    "causal_lm": "MODEL_FOR_CAUSAL_LM",
    "seq_cls": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "image_cls": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "token_cls": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "masked_lm": "MODEL_FOR_MASKED_LM",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "multimodal_lm": "MODEL_FOR_MULTIMODAL_LM",
    "speech_seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "backbone": "MODEL_FOR_BACKBONE",
    "object_detection": "MODEL_FOR_OBJECT_DETECTION",
    "pretraining": "MODEL_FOR_PRETRAINING",
}
COMPONENT = "component"


@functools.cache
def _mappings() -> dict[str, dict[str, str]]:
    """Head -> model type -> class name."""
    suffix = "_MAPPING_NAMES"
    rest = {k.removesuffix(suffix): k for k in dir(modeling_auto) if k.startswith("MODEL") and k.endswith(suffix)}
    keys = {head: rest.pop(prefix) for head, prefix in _SHORT.items() if prefix in rest}
    keys |= {prefix.removeprefix("MODEL_FOR_").lower(): key for prefix, key in rest.items()}
    first = {h: {n: c if isinstance(c, str) else c[0] for n, c in getattr(modeling_auto, k).items()}
             for h, k in keys.items()}  # fmt: skip
    return first


@functools.cache
def _types() -> tuple[list[str], list[str]]:
    """Model types with and without an Auto class."""
    known = set().union(*_mappings().values())
    return [n for n in CONFIG_MAPPING_NAMES if n in known], [n for n in CONFIG_MAPPING_NAMES if n not in known]


def transformers_names(components: bool = False) -> list[str]:
    """The model types that have an Auto class; with `components`, then those that are only parts of others."""
    auto, parts = _types()
    return auto + parts if components else list(auto)


def heads_of(name: str) -> list[str]:
    """The heads of a model type, one per distinct class; `["component"]` for a type without an Auto class."""
    by_class: dict[str, str] = {}
    for head, classes in _mappings().items():
        if name in classes:
            by_class.setdefault(classes[name], head)
    if not by_class and name not in CONFIG_MAPPING_NAMES:
        raise LookupError(f"transformers has no model type {name!r}")
    return list(by_class.values()) or [COMPONENT]


def canonical_head(name: str, head: str) -> str:
    """The head of `heads_of(name)` with the same class; "base" stands for the first head where there is no base."""
    heads = heads_of(name)
    if head in heads or head == "base":
        return head if head in heads else heads[0]
    classes = _mappings().get(head, {})
    if name not in classes:
        raise LookupError(f"{name!r} has no head {head!r}, only {', '.join(heads)}")
    return next(h for h in heads if _mappings()[h][name] == classes[name])


def model_class(name: str, head: str) -> type[PreTrainedModel]:
    """The class of one head of `heads_of(name)`."""
    if head == COMPONENT:
        return _component_class(CONFIG_MAPPING[name])
    # the class may live in the module of another model type: the Auto classes know where
    return modeling_auto.MODEL_MAPPING._load_attr_from_module(name, _mappings()[head][name])


def config_for(cls: type, config: PreTrainedConfig) -> PreTrainedConfig:
    """`config`, or the part of it that `cls` is made for: the text head of a multimodal type takes the text config."""
    own = getattr(cls, "config_class", None)
    if own is None or isinstance(config, own):
        return config
    return next((c for c in all_configs(config) if isinstance(c, own)), config)


def _component_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The class with a forward whose config is `config_class`; of several, the plainest `...Model`."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(name)
    found = []
    for key, cls in vars(module).items():
        if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == name):
            continue
        if not key.endswith("PreTrainedModel") and cls.forward is not nn.Module.forward and _takes(cls, config_class):
            found.append((not key.endswith("Model"), len(key), key))
    if not found:
        raise LookupError(f"no PreTrainedModel class with config {config_class.__name__} in {name}")
    return getattr(module, min(found)[2])


def _takes(cls: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> bool:
    wanted = (config_class, config_class.__name__)
    annotation = inspect.signature(cls.__init__).parameters.get("config")
    return (
        getattr(cls, "config_class", None) is config_class
        or vars(cls).get("__annotations__", {}).get("config") in wanted
        or (annotation is not None and annotation.annotation in wanted)
    )
