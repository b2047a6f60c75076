"""What was patched, written into the transformers config, so that a saved model can be rebuilt.

`config.quantization_config = {"quant_method": "autonorm", "version": …, "patches": [{"spec": …, "modules": […]},
…]}`: the one door through which stock `from_pretrained` lets a package change modules before the weights are loaded.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..nn.wrapper import Wrapper

QUANT_METHOD = "autonorm"
# Where the model is quantised too, `quantization_config` belongs to that method; ours stands beside it.
BESIDE = "autonorm_config"
TAGS = ("autonorm", "hf_autonorm")  # of a patched model on the Hub


def require_module(model: Any) -> None:
    """Raises UnsupportedError, with the remedy, where `model` is none."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, (str, os.PathLike)):
        got = f"{str(model)!r}; load it first, e.g. AutoModel.from_pretrained({str(model)!r})"
    elif isinstance(model, type):
        got = f"the class {model.__name__}; make a model of it"
    else:
        got = type(model).__name__
    raise UnsupportedError(f"a model must be an nn.Module, got {got}")


def wrappers(model: nn.Module) -> list[tuple[str, Wrapper]]:
    """All wrappers with their names, each object once, in the model's order."""
    require_module(model)
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Wrapper)]


def patch_entries(model: nn.Module) -> list[dict[str, Any]]:
    """`[{"spec": PatchConfig as a dict, "modules": names}]`, one entry for each distinct setting, in the order of the
    `patch` calls."""
    entries: dict[str, dict[str, Any]] = {}
    for name, wrapper in sorted(wrappers(model), key=lambda found: getattr(found[1], "patch_order", 0)):
        config = getattr(wrapper, "patch_config", None)
        if config is not None:
            entry = entries.setdefault(config.to_json(), {"spec": config.to_dict(), "modules": []})
            entry["modules"].append(name)
    return list(entries.values())


def record_dict(model: nn.Module) -> dict[str, Any] | None:
    """The whole record of `model`, JSON-ready, or None where nothing is patched."""
    from ..version import __version__

    entries = patch_entries(model)
    record = {"quant_method": QUANT_METHOD, "version": __version__, "patches": entries}
    return json.loads(json.dumps(record)) if entries else None


def read_record(config: Any) -> dict[str, Any] | None:
    """Our record in a transformers config, wherever it stands."""
    for attribute in ("quantization_config", BESIDE):
        record: Any = getattr(config, attribute, None)
        record = record.to_dict() if hasattr(record, "to_dict") else record
        if isinstance(record, dict) and record.get("quant_method") == QUANT_METHOD:
            return record
    return None


def update_record(model: nn.Module) -> None:
    """Makes every config of `model`, of a part of it, or of a model that shares a part of it, say what is patched now.

    The config objects are copied first (an unpatched model may share them), all modules of the tree switch to the
    copy.
    """
    for root in _roots(model):
        _update_root(root)
        _update_tags(root)


def watch(wrapper: Wrapper, prefix: str, keep_vars: bool) -> None:
    """A pre-hook on `state_dict`: a patched module may have become part of another model, whose config does not say so
    (`EncoderDecoderModel(encoder=patch(…), …)`, `model.encoder = other.encoder`). Then the record is written now.

    A module does not know what it is part of; who asks for its tensors does, and that is a caller of this function.
    """
    from transformers import PreTrainedModel

    asked = None  # the call of the outermost model's state_dict
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "state_dict":
        if isinstance(frame.f_locals.get("self"), PreTrainedModel):
            asked = frame
        frame = frame.f_back
    if asked is None:
        return
    root = asked.f_locals["self"]
    name = prefix.removeprefix(asked.f_locals.get("prefix") or "").removesuffix(".")
    record = read_record(root.config)
    if record is not None and any(name in entry["modules"] for entry in record["patches"]):
        return
    if "_orig_mod" in name or hasattr(root, "peft_config"):  # names as torch.compile and PEFT make them do not last
        return
    update_record(root)
    saving = frame is not None and frame.f_code.co_name == "save_pretrained"
    folder = frame.f_locals.get("save_directory") if saving else None
    if folder is not None and os.path.exists(os.path.join(folder, "config.json")):
        root.config.save_pretrained(folder)  # transformers writes it before it asks for the tensors


def _roots(model: nn.Module) -> list[nn.Module]:
    """`model` and the outermost models in memory that share a module with it: `patch(model.encoder)` concerns `model`,
    and a shallow copy, or a second head on the same backbone, is patched along."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    # A module does not know its parent. One walk over the heap finds the few models in it.
    kinds, pending = set(), [PreTrainedModel]
    while pending:
        kind = pending.pop()
        kinds.add(kind)
        pending += kind.__subclasses__()
    models = [o for o in gc.get_objects() if type(o) in kinds]
    own = {id(m) for m in model.modules()}
    inside = {id(o): {id(m) for m in o.modules()} for o in [*models, model]}
    concerned = {id(o): o for o in [*models, model] if not own.isdisjoint(inside[id(o)])}
    return [o for key, o in concerned.items() if not any(key in inside[k] for k in concerned if k != key)]


def _update_root(root: nn.Module) -> None:
    from transformers import PreTrainedConfig

    memo: dict[int, Any] = {}
    holders: dict[int, tuple[Any, nn.Module]] = {}  # config id → (config, its outermost module)
    for module in root.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            holders.setdefault(id(config), (config, module))
    records = {key: record_dict(module) for key, (_, module) in holders.items()}
    changed = {key for key, (config, _) in holders.items() if read_record(config) != records[key]}
    if not changed:
        return
    for config, _ in holders.values():
        copy.deepcopy(config, memo)
    for module in root.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = memo[id(config)]
    for key in holders:
        _write(memo[key], records[key])


def _update_tags(root: nn.Module) -> None:
    """The tags that the stock `push_to_hub` and Trainer write into a model card."""
    if hasattr(root, "model_tags"):
        before = root.model_tags or []
        tags = [tag for tag in before if tag not in TAGS] + (list(TAGS) if wrappers(root) else [])
        if tags != before:
            root.model_tags = tags


def _write(config: Any, record: dict[str, Any] | None) -> None:
    if read_record(config) is not None:
        for attribute in ("quantization_config", BESIDE):
            value: Any = getattr(config, attribute, None)
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if isinstance(value, dict) and value.get("quant_method") == QUANT_METHOD:
                delattr(config, attribute)
    if record is not None:
        foreign = getattr(config, "quantization_config", None) is not None
        setattr(config, BESIDE if foreign else "quantization_config", record)
