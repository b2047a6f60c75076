"""What a batch may be, and how it becomes the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..errors import ConfigError

_ALLOWED = (
    "a batch is a dictionary of the model's inputs (`model(**batch)`), one tensor, or a tuple of tensors whose first "
    "is the input, as a DataLoader gives (inputs, labels)"
)
_LABELS = {"labels", "label", "target", "targets", "y"}


def as_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, one by one; one tensor or dictionary alone is one batch.

    Raises ConfigError where `batches` is no iterable of batches, or where one of them is none.
    """
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise ConfigError(f"batches={batches!r:.80} must be an iterable of batches; {_ALLOWED}")
    for index, batch in enumerate(batches):
        check_batch(batch, f"batch {index}")
        yield batch


def check_batch(batch: Any, name: str = "the batch") -> None:
    """Raises ConfigError where `batch` is none."""
    several = isinstance(batch, (tuple, list))
    if several and not batch:
        raise ConfigError(f"{name} is an empty {type(batch).__name__}; {_ALLOWED}")
    first = batch[0] if several else batch
    if isinstance(first, (str, bytes)):
        raise ConfigError(f"{name} is text, {first!r:.40}; tokenize it first: tokenizer(texts, return_tensors='pt')")
    if isinstance(first, Mapping) and first and all(map(_is_plain, first.values())):
        found = ", ".join(f"{key!r} is a {type(value).__name__}" for key, value in list(first.items())[:3])
        raise ConfigError(
            f"{name} holds no tensor ({found}); e.g. tokenizer(texts, padding=True, return_tensors='pt') makes them"
        )
    if not isinstance(first, (Tensor, Mapping)):
        what = f"a {type(batch).__name__} of {type(first).__name__}" if several else f"a {type(first).__name__}"
        raise ConfigError(f"{name} is {what}; {_ALLOWED}")


def _is_plain(value: Any) -> bool:
    """Text, a number, or lists of them: a row of a data set, or what a tokenizer gives without `return_tensors`."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bytes, bool, int, float))


def forward(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch, see `arguments_of`."""
    args, kwargs = arguments_of(model, batch)
    return model(*args, **kwargs)


def first_input(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The input of a layer, in a hook `with_kwargs`: positional, or by its own keyword (`hidden_states=`)."""
    return args[0] if args else next(iter(kwargs.values()))


def attention_mask(model: nn.Module, batch: Any) -> Any:
    """The attention mask in a batch, or None."""
    args, kwargs = arguments_of(model, batch)
    if "attention_mask" in kwargs:
        return kwargs["attention_mask"]
    names = [p.name for p in _positional(model) or []]
    return dict(zip(names, args)).get("attention_mask")


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) for `model`'s forward.

    A dictionary is passed by name, a tensor alone. Of a tuple or list, as an ordinary DataLoader gives it, the first
    is the input; further ones are inputs too where forward requires them, or where they are a mask (of 0 and 1, shaped
    like the input) for a parameter named so. Else they are labels, which no calibration needs: dropped, if forward has
    no parameter for them, or it is optional and they hold one value an example. Anything else is ambiguous.

    Raises ConfigError for an ambiguous batch.
    """
    check_batch(batch)
    if isinstance(batch, (tuple, list)):
        if isinstance(batch[0], Mapping):
            batch = batch[0]
        else:
            return tuple(map(_usable, _inputs_in(model, batch))), {}
    if isinstance(batch, Mapping):
        return (), {name: _usable(value) for name, value in batch.items()}
    return (_usable(batch),), {}


def _inputs_in(model: nn.Module, batch: tuple | list) -> list[Any]:
    parameters = _positional(model)
    if parameters is None:
        return list(batch)
    inputs = [batch[0]]
    for index, value in enumerate(batch[1:], 1):
        parameter = parameters[index] if index < len(parameters) else None
        if parameter is None or parameter.name in _LABELS and parameter.default is not parameter.empty:
            break
        if parameter.default is parameter.empty or _is_mask(parameter.name, value, batch[0]):
            inputs.append(value)
        elif not isinstance(value, Tensor) or value.dim() <= 1:  # one value an example
            break
        else:
            raise ConfigError(
                f"a batch of {len(batch)} parts is ambiguous: part {index}, of shape {tuple(value.shape)}, may be "
                f"labels, or {parameter.name!r} of {type(model).__name__}.forward. Give a dictionary: "
                f"{{{parameters[0].name!r}: …, …}}"
            )
    return inputs


def _positional(model: nn.Module) -> list[inspect.Parameter] | None:
    """The positional parameters of forward; None where it takes any number of them."""
    model = unwrapped(model)
    if hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None)):
        model = unwrapped(model.get_base_model())
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def unwrapped(model: nn.Module) -> nn.Module:
    """`model` without the wrappers of `torch.compile`, data parallelism and weight averaging around it."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)):
            model = model.module
        else:
            return model


def _is_mask(name: str, value: Any, first: Tensor) -> bool:
    if "mask" not in name or not isinstance(value, Tensor) or value.shape != first.shape:
        return False
    return bool(((value == 0) | (value == 1)).all())


def _usable(value: Any) -> Any:
    """A tensor made in inference mode cannot take part in what calibration computes with gradients."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


__all__ = ["arguments_of", "as_batches", "attention_mask", "check_batch", "first_input", "forward", "unwrapped"]
