"""Loading patched models of every kind: transformers, timm, plain modules."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..patching.record import QUANT_METHOD, wrappers
from ..patching.surgery import rebuild
from .atomic import FolderError, restore

RECORD_FILE = "autonorm_config.json"
# What is needed beside the weights; other formats in a Hub repository are not downloaded.
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def from_pretrained(path: str | os.PathLike, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The model saved in a folder or a Hub repository, patched as it was, in eval mode.

        model = from_pretrained("my-model")                 # transformers or timm: the class is known
        model = from_pretrained("my-net", model=MyNet())    # a module of your own: rebuilt into the fresh one given

    Args:
        path: a folder, or a Hub id (downloaded once, then from the cache).
        model: a fresh, unpatched model of the class that was saved; patched and filled in place.
        options: `revision`, `token`, `cache_dir` for the download; the others for transformers' `from_pretrained`
            (`dtype`, `device_map`, a `quantization_config` of another library on top of the patch, …).

    Raises FolderError where there is no such folder or repository, or no model in it; CheckpointError where the
    checkpoint and the model do not belong together, tensor by tensor.
    """
    if model is not None and not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}; make one: model={model.__name__}(…)" if isinstance(model, type) else model
        raise ConfigError(f"model must be a fresh model of the class that was saved, got {kind}")
    folder = local_folder(path, **{k: options.pop(k) for k in ("revision", "token", "cache_dir") if k in options})
    config = read_json(folder / "config.json")
    known = (folder / RECORD_FILE).exists() or not {"model_type", "architecture"}.isdisjoint(config)
    if model is None and not known:
        raise FolderError(f"{path} holds no saved model: {_contents(folder)}")
    if model is None and not (folder / RECORD_FILE).exists() and "model_type" in config:
        from .stacking import stacked_options

        return _transformers_class(config).from_pretrained(folder, **stacked_options(folder, config, options))
    if options:
        raise ConfigError(f"{sorted(options)} are options of transformers models only, and {path} holds another one")
    if model is None:
        model = _timm_model(config, path)
    return _load_into(model, folder, config)


def _contents(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    inside = [
        name for name in names if (folder / name / "config.json").exists() or (folder / name / RECORD_FILE).exists()
    ]
    if inside:
        return f"it has no config.json, but {inside[0]} in it has"
    found = f"it has {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "it is empty"
    return f"{found}; no config.json of a transformers or timm model, no {RECORD_FILE}"


def local_folder(path: str | os.PathLike, **options: Any) -> Path:
    """The folder itself, or that of the Hub cache."""
    if not isinstance(path, (str, os.PathLike)) or not str(path).strip():
        raise FolderError(f"{path!r} names no folder and no model on the Hub (owner/name)")
    folder = Path(path)
    restore(folder.resolve())
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise FolderError(f"{path} is a file; name the folder it is in: {folder.parent}")
    missing = f"there is no folder {path}{_similar(folder)}"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) or str(path).startswith("."):
        raise FolderError(f"{missing}, and it is no Hub id either (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(_WANTED), **options))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        said = " ".join(str(error).split())[:300]
        raise FolderError(f"{missing}, and the Hub gives no model of this name: {said}") from error


def load_tokenizer(path: str | os.PathLike, **options: Any) -> Any:
    """The tokenizer beside a model in a folder or on the Hub; `options` are for `AutoTokenizer.from_pretrained`.

    Its `model_max_length` is at most what the model has positions for. Raises FolderError where there is none:
    transformers makes up one without a vocabulary, in which every word is unknown.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        empty = not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    except (ValueError, OSError, TypeError) as error:
        if not Path(path).is_dir() or any(Path(path).glob("tokenizer*")):
            raise
        raise FolderError(_NO_TOKENIZER.format(path=path)) from error
    if empty:
        raise FolderError(_NO_TOKENIZER.format(path=path))
    positions = getattr(AutoConfig.from_pretrained(path), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return tokenizer


_NO_TOKENIZER = (
    "{path} holds no tokenizer, so texts cannot be read: save one beside the model "
    "(tokenizer.save_pretrained(folder)). Models of images and sound have none: give them batches in Python"
)


def _similar(folder: Path) -> str:
    """` (nearest: 'my-model')`: folders beside the missing one whose names are like it."""
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    close = difflib.get_close_matches(folder.name, [f.name for f in beside if f.is_dir()], cutoff=0.7)
    return f" (nearest: {', '.join(repr(str(folder.parent / name)) for name in close)})" if close else ""


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{file.name} in {file.parent} is no valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _transformers_class(config: dict[str, Any]) -> Any:
    import transformers

    name = (config.get("architectures") or ["AutoModel"])[0]
    found = getattr(transformers, name, None)
    if found is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no class {name!r}, which config.json names; load the model "
            "through its own code, after `import hf_autonorm`"
        )
    return found


def _timm_model(config: dict[str, Any], path: Any) -> nn.Module:
    if "architecture" not in config:
        raise UnsupportedError(
            f"{path} holds a module of your own; pass a fresh one: from_pretrained({str(path)!r}, model=…)"
        )
    try:
        import timm
    except ImportError:
        raise UnsupportedError(f"{path} holds a timm model; pip install timm") from None
    options = {key: config[key] for key in ("num_classes", "global_pool") if key in config} | config.get(
        "model_args", {}
    )
    return timm.create_model(config["architecture"], pretrained=False, **options)


def _load_into(model: nn.Module, folder: Path, config: dict[str, Any]) -> nn.Module:
    from huggingface_hub import load_state_dict_from_file

    from .loading import resolve_patches

    record = read_json(folder / RECORD_FILE) or config.get("quantization_config") or {}
    if record.get("quant_method", QUANT_METHOD) != QUANT_METHOD:
        raise UnsupportedError(f"{folder} is quantised by {record['quant_method']!r}; load it through transformers")
    if wrappers(model):
        raise CheckpointError("the model given is patched already; give a fresh one, the checkpoint knows the patch")
    files = _weight_files(folder)
    model = rebuild(model, resolve_patches(model, record.get("patches", [])))
    state = {name: tensor for file in files for name, tensor in load_state_dict_from_file(file).items()}
    _require_shapes(model, state, folder)
    _take_dtypes(model, state)
    left_out = model.load_state_dict(state, strict=False)
    # Of tensors that share memory the file holds one; the model's own sharing brings the others.
    own = model.state_dict(keep_vars=True)
    filled = {own[name].data_ptr() for name in state if name in own}
    missing = [name for name in left_out.missing_keys if own[name].numel() and own[name].data_ptr() not in filled]
    if missing or left_out.unexpected_keys:
        words = [f"lacks {', '.join(missing[:3])}"] if missing else []
        words += [f"has {', '.join(left_out.unexpected_keys[:3])}, unknown to the model"] * bool(
            left_out.unexpected_keys
        )
        raise CheckpointError(
            f"the checkpoint in {folder} {' and '.join(words)}: not the same {type(model).__name__}?"
        )
    return model.eval()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    if not (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder} holds no model.safetensors")
    return [folder / "model.safetensors"]


def _require_shapes(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    for name, tensor in model.state_dict().items():
        if name in state and state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(state[name].shape)} in the checkpoint in {folder} and "
                f"{tuple(tensor.shape)} in the model: give a {type(model).__name__} made as the saved one was"
            )


def _take_dtypes(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The saved dtypes, as transformers does it: loading must not round."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
