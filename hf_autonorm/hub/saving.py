"""Saving patched models of every kind: transformers, timm, plain modules. safetensors only, no network."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, nearest
from ..patching.batches import unwrapped
from ..patching.record import QUANT_METHOD, record_dict, require_module, update_record
from .atomic import replacing
from .custom_code import CODE_FILE, auto_map_of, write_custom_code
from .reading import RECORD_FILE, from_pretrained, local_folder, read_json
from .remote import is_own_class
from .stacking import join_records

_WEIGHTS = re.compile(r"(model|pytorch_model)([.-][^/]*)?\.(safetensors|bin)(\.index\.json)?")
_OURS = (RECORD_FILE, CODE_FILE, "assets/gates.png", "assets/gate_history.png")
_NOT_OPTIONS = {"self", "save_directory", "is_main_process", "push_to_hub", "token", "kwargs"}
# What belongs to a model beside weights and config: tokenizer, processor, templates, sentence-transformers' layout.
_COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "chat_template*",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/*.json",
)  # fmt: skip


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    metrics: Mapping[str, float] | None = None,
    baseline: Mapping[str, float] | None = None,
    base_model: str | None = None,
    dataset: str | Mapping[str, str] | None = None,
    command: str | None = None,
    callbacks: Iterable[Any] | None = None,
    tokenizer: Any = None,
    files_from: str | os.PathLike | None = None,
    license: str | None = None,
    repo_id: str | None = None,
    card: bool = True,
    custom_code: bool = False,
    is_main_process: bool = True,
    **options: Any,
) -> Path:
    """Saves `model`, its patch and a model card into `directory`; returns the folder.

        save_pretrained(model, "my-model", metrics={"accuracy": 0.91}, baseline={"accuracy": 0.90})

    Stock `AutoModel….from_pretrained` loads a transformers model back once `hf_autonorm` is imported; ours loads any
    model. The folder is written under a temporary name and put in place in one step; other files in it (a README.md, a
    tokenizer, checkpoints) stay. Nothing is sent anywhere.

    Args:
        model: patched or not; `torch.compile`, data-parallel and weight-averaging wrappers are taken off.
        directory: made if missing.
        metrics: `{name: value}` for the card.
        baseline: those of the model that it is compared with.
        base_model: Hub id of the model it started from; default: what the transformers config says.
        dataset: where the metrics are from: a Hub id, a name, or {"type": Hub id, "name", "config", "split"}.
        command: the command line that trained it.
        callbacks: those of the training run: a ModelCardCallback fills the card with what happened in it (whatever is
            given here wins), a GateFreezeCallback tells its decision.
        tokenizer: anything with `save_pretrained` that belongs beside the model (tokenizer, image processor).
        files_from: a folder or Hub id whose tokenizer and processor files are copied as they are.
        license: for the card's metadata; default: that of a README.md in the folder.
        repo_id: where the model will be on the Hub; the card's snippet loads it from there.
        card: write README.md, or bring its section up to date; its other text and metadata are kept.
        custom_code: write `modeling_autonorm.py` beside the weights: `AutoModel….from_pretrained(…,
            trust_remote_code=True)` then loads it where this package is not installed. transformers models only.
        is_main_process: False on the other ranks of a distributed run: nothing is written.
        options: for transformers' own `save_pretrained` (`max_shard_size`, `variant`, …).

    Raises `ConfigError` and `FolderError` before anything is written; `CardError` where only the card cannot be
    written: the weights are saved then.
    """
    model = unwrapped(model)
    _check_arguments(model, tokenizer, options)
    if not is_main_process:
        return Path(directory)
    # A model that brought its code along keeps it, written anew for what is saved now.
    custom_code = custom_code or is_own_class(type(model))
    auto_map = auto_map_of(model) if custom_code else None
    failure = None
    with replacing(directory, stale=lambda path: _is_stale(path, Path(directory).resolve())) as (new, target):
        if is_transformers(model):
            _write_transformers(model, new, options)
            write_custom_code(new, auto_map)
            join_records(new)
        else:
            _write_plain(model, new, options)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        if files_from is not None:
            _copy_companions(files_from, new)
        if card:
            from .cards import write_card
            from .metadata import CardError

            try:
                write_card(
                    model,
                    new,
                    name=target.name,
                    previous=target,
                    repo_id=repo_id,
                    metrics=metrics,
                    baseline=baseline,
                    base_model=base_model,
                    dataset=dataset,
                    command=command,
                    callbacks=callbacks,
                    license=license,
                )
            except OSError:  # a full disk: the folder stays as it was
                raise
            except Exception as error:  # what is wrong with a card, or its pictures, is no reason to lose the weights
                failure = error
    if failure is not None:
        said = str(failure) if isinstance(failure, CardError) else f"the card: {type(failure).__name__}: {failure}"
        raise CardError(f"{said}. The model itself is saved in {directory}") from failure
    return Path(directory)


def is_transformers(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def is_timm(model: nn.Module) -> bool:
    return type(model).__module__.split(".")[0] == "timm" and hasattr(model, "pretrained_cfg")


def _check_arguments(model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
    require_module(model)
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigError(
            f"tokenizer={tokenizer!r} has no save_pretrained; give the object (AutoTokenizer.from_pretrained(…)), or "
            "the folder or Hub id that holds its files as files_from"
        )
    if options.pop("push_to_hub", False):
        raise ConfigError(
            "save_pretrained never touches the network; leave push_to_hub out, hf_autonorm.push_to_hub sends"
        )
    if options.pop("safe_serialization", True) is not True:
        raise ConfigError("safe_serialization=False: only safetensors are written")
    known = {"max_shard_size"}
    if is_transformers(model):
        known |= set(inspect.signature(type(model).save_pretrained).parameters) - _NOT_OPTIONS
    unknown = sorted(options.keys() - known)
    if unknown:
        ours = set(inspect.signature(save_pretrained).parameters) - {"model", "directory", "options"}
        kind = (
            "a transformers model" if is_transformers(model) else f"a {type(model).__name__}, no transformers model,"
        )
        raise ConfigError(f"{unknown[0]!r} is no option for saving {kind}; {nearest(unknown[0], known | ours)}")


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_transformers(model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    names = [name for name, _ in model.named_modules()]
    if not any("_orig_mod" in name for name in names):
        update_record(model)  # a part may have been patched before it was put into this model
    elif "state_dict" not in options:
        options["state_dict"] = _clean(model.state_dict())
    model.save_pretrained(folder, **options)


def _write_plain(model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(_clean(model.state_dict()), folder, metadata={"format": "pt"}, **options)
    record = record_dict(model) or {"quant_method": QUANT_METHOD, "patches": []}
    for entry in record["patches"]:
        entry["modules"] = [name.replace("._orig_mod", "") for name in entry["modules"]]
    record["class"] = type(model).__name__
    if is_timm(model):
        from timm.models._hub import save_config_for_hf

        save_config_for_hf(model, str(folder / "config.json"))
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _clean(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as they are without `torch.compile` on parts of the model."""
    return {name.replace("._orig_mod", ""): tensor for name, tensor in state.items()}


def _is_stale(file: Path, folder: Path) -> bool:
    """Whether an old file belongs to the model that is being replaced (and not to the user)."""
    name = file.relative_to(folder).as_posix()
    if name == "config.json":
        return not {"model_type", "architecture"}.isdisjoint(read_json(file))
    return is_stale_name(name)


def is_stale_name(name: str) -> bool:
    """Whether a file of that path in a model's folder was written with the model, whatever is in it."""
    return name in _OURS or _WEIGHTS.fullmatch(name) is not None


def _copy_companions(source: str | os.PathLike, folder: Path) -> None:
    source = local_folder(source)
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            place = folder / file.relative_to(source)
            if file.is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)


__all__ = ["from_pretrained", "save_pretrained"]
