"""The classes by which `trust_remote_code=True` loads a patched model where this package is not installed.

`config.json` names them in its `auto_map`, `modeling_autonorm.py` beside the weights holds this module and what it
needs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..patching.record import QUANT_METHOD

MODULE = "modeling_autonorm"
_DOOR = threading.RLock()


@contextlib.contextmanager
def door() -> Iterator[None]:
    """While it is open, `from_pretrained` rebuilds patched models. The package, where it is installed, goes first: its
    verbs know its own layers only. Else the classes of this file stand in for it, and are taken away after."""
    from .loading import AutoNormQuantizationConfig, AutoNormQuantizer

    try:  # transformers takes an import outside a `try` for a requirement
        import hf_autonorm  # noqa: F401
    except ImportError:
        pass
    with _DOOR:
        if QUANT_METHOD in AUTO_QUANTIZER_MAPPING:
            yield
            return
        AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = AutoNormQuantizationConfig
        AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = AutoNormQuantizer
        try:
            yield
        finally:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD], AUTO_QUANTIZER_MAPPING[QUANT_METHOD]


def stock_class(name: str) -> type | None:
    """The model class of transformers with this name."""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def subclass(stock: Any, module: str) -> type:
    """`stock` under its own name, with a `from_pretrained` that goes through the door."""

    def from_pretrained(cls, *args: Any, **kwargs: Any):
        with door():
            loaded = super(own, cls).from_pretrained(*args, **kwargs)
        if cls._auto_class is None:  # transformers 5.0 leaves it so; then save_pretrained would forget this file
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            for auto, path in (getattr(model.config, "auto_map", None) or {}).items():
                if is_reference(path) and path.endswith(f".{cls.__name__}"):
                    cls.register_for_auto_class(auto)
        return loaded

    body = {"__module__": module, "__doc__": stock.__doc__, "from_pretrained": classmethod(from_pretrained)}
    own: Any = type(stock.__name__, (stock,), body)
    return own


def __getattr__(name: str) -> type:
    stock = None if name.startswith("_") else stock_class(name)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = own = subclass(stock, __name__)
    return own


def is_own_class(cls: type) -> bool:
    """Whether it came out of a `modeling_autonorm.py`."""
    return cls.__module__.rpartition(".")[2] == MODULE


def drop_auto_map(config: Any) -> None:
    """A model of a stock class is saved without our file: its config must not point at it."""
    kept = {auto: path for auto, path in (getattr(config, "auto_map", None) or {}).items() if not is_reference(path)}
    if kept:
        config.auto_map = kept
    elif hasattr(config, "auto_map"):
        del config.auto_map


def is_reference(path: Any) -> bool:
    """Whether an entry of an `auto_map` names our file (`modeling_autonorm.X`, `owner/repo--modeling_autonorm.X`)."""
    return isinstance(path, str) and path.rpartition("--")[2].startswith(f"{MODULE}.")
