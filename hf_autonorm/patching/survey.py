"""One walk over a model: the names of its modules, who holds them, and why one cannot be swapped where it stands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..nn.traits import NormTraits
from ..nn.wrapper import Wrapper
from .heads import heads
from .reads import direct_reads, is_read

# Their fused path reads the children's weights directly, in eval mode, from C++.
FUSED_PARENTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Target:
    """A module that a rule of the patch is about; `reason` says why it is left alone, None where it is patched."""

    name: str
    module: nn.Module
    kind: str  # "norm", "linear" or "conv"
    names: list[str] = field(default_factory=list)  # all names of this object; a shared module has several
    reason: str | None = None
    traits: NormTraits | None = None


class Survey:
    """One walk over a model: every module object once, with all its names and its ancestors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[int, list[str]] = {}
        self.parents: dict[int, list[tuple[nn.Module, str]]] = {}
        self.modules: dict[int, nn.Module] = {}
        self._tied: dict[int, set[int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)
            self.modules[id(module)] = module
        for module in self.modules.values():
            for attribute, child in module._modules.items():
                if child is not None:
                    self.parents.setdefault(id(child), []).append((module, attribute))
            for p in module._parameters.values():
                if p is not None:
                    self._tied.setdefault(id(p), set()).add(id(module))
        self.held_outside = self._held_outside()
        self.dotted = dict(model.named_modules(remove_duplicate=False))

    def ancestors(self, name: str) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
        """(ancestor, path from it), nearest first."""
        parts = name.split(".") if name else []
        for split in range(len(parts) - 1, -1, -1):
            yield self.dotted[".".join(parts[:split])], tuple(parts[split:])

    def swap(self, swaps: dict[int, nn.Module]) -> nn.Module:
        """Puts new modules, by the id of the old, in all places of the old ones; returns the (new) root."""
        for key, new in swaps.items():
            for parent, attribute in self.parents.get(key, []):
                parent._modules[attribute] = new
        return swaps.get(id(self.model), self.model)

    def shares_parameters(self, module: nn.Module) -> bool:
        """Whether another module object holds one of this one's parameters (tied weights)."""
        return any(len(self._tied[id(p)]) > 1 for p in module._parameters.values() if p is not None)

    def tied_by_name(self, module: nn.Module) -> bool:
        """Whether a transformers model ties one of its parameters by name (`_tied_weights_keys`).

        Wrapped it has another name: the tie would not come back from a checkpoint, or reach to what the patch adds.
        """
        return any(id(p) in self._declared_ties for p in module._parameters.values() if p is not None)

    @functools.cached_property
    def _declared_ties(self) -> set[int]:
        found: set[int] = set()
        for module in self.modules.values():
            pairs = getattr(module, "all_tied_weights_keys", None)
            if isinstance(pairs, dict) and pairs:
                own = dict(module.named_parameters(remove_duplicate=False))
                found |= {id(own[name]) for pair in pairs.items() for name in pair if name in own}
        return found

    @functools.cached_property
    def heads(self) -> dict[int, str]:
        """Why to leave a module alone, by its id, for output embeddings and modules in task heads."""
        return heads(list(self.modules.values()))

    def _held_outside(self) -> set[int]:
        """Modules that somebody keeps in a plain list, dict or attribute: a swap in the tree would not reach them."""
        held: set[int] = set()

        def look(value: object, depth: int) -> None:
            if isinstance(value, nn.Module):
                held.add(id(value))
            elif depth and isinstance(value, (list, tuple, set)):
                for item in value:
                    look(item, depth - 1)
            elif depth and isinstance(value, dict):
                for item in value.values():
                    look(item, depth - 1)

        own_tables = {"_modules", "_parameters", "_buffers"}
        for module in self.modules.values():
            if not isinstance(module, Wrapper):
                for attribute, value in module.__dict__.items():
                    if attribute not in own_tables and not attribute.endswith("_hooks"):
                        look(value, 2)
        return held


def structural_reason(survey: Survey, name: str, module: nn.Module, own: list[torch.Tensor]) -> str | None:
    """Why a module with the tensors `own` cannot be wrapped where it stands, or None."""
    required = [
        p
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    ]
    if len(required) > 1:
        return f"its forward takes more than one argument ({', '.join(p.name for p in required)})"
    if any(not p.is_floating_point() for p in own):
        return "integer weight"
    if survey.tied_by_name(module):
        return "the model ties its parameters to another module's by their names, which wrapping would change"
    if id(module) in survey.held_outside:
        return "also held outside the module tree (a list or plain attribute), where a swap does not reach"
    for one_name in survey.names[id(module)]:
        for ancestor, path in survey.ancestors(one_name):
            parent: type = type(ancestor)
            if isinstance(ancestor, FUSED_PARENTS):
                return f"inside {parent.__name__}, whose fused path reads its weight directly"
            if is_read(path, direct_reads(parent)):
                return f"{parent.__name__}.forward reads its weight directly"
    return None
