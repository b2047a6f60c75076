"""Folding: what no longer adapts is collapsed into something simpler and faster."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..config import GateConfig, in_range
from ..errors import NotPatchedError
from ..nn.autonorm import AutoNorm, autonorms
from ..nn.wrapper import outside_inference_mode
from .batches import as_batches, forward
from .calibrate import undisturbed
from .masks import connect_masks
from .record import update_record, wrappers
from .survey import Survey


@outside_inference_mode
def fold(model: nn.Module, batches: Iterable[Any] | None = None, tolerance: float = 1e-3) -> nn.Module:
    """Collapses the layers that no longer adapt; the model's outputs change by about `tolerance` at most.

    A gate that stays within `tolerance` of the original gives the original module back, the same object; one that
    stays within it of one branch becomes that branch alone (at full strength). Weights that depend on the input are
    judged over `batches`. Where nothing of the patch is left, the model is a stock one: same classes, same state dict.

    Args:
        model: a patched model; changed in place.
        batches: as for `calibrate`; without them only gates whose weights are free of the input are judged.
        tolerance: largest deviation of a weight from 1, at most 0.49.

    Returns the model (or the original, where the model itself was the wrapped norm).
    """
    in_range("tolerance", tolerance, 0.0, 0.49)
    found = wrappers(model)
    if not found:
        raise NotPatchedError(f"{type(model).__name__} holds no patched module; there is nothing to fold")
    lowest = _lowest_weights(model, batches)
    enough = 1 - tolerance - 1e-6  # weights are in fp32
    swaps: dict[int, nn.Module] = {}
    folded, unknown, held = 0, 0, 0
    open_gates: list[tuple[float, str, str]] = []  # the largest of a gate's lowest weights, what it is of, the layer
    for name, wrapper in found:
        strength = wrapper.scalar("strength")
        if strength == 0:
            swaps[id(wrapper)] = wrapper.original
        elif isinstance(wrapper, AutoNorm) and not wrapper.replaces:
            weights = lowest.get(wrapper)
            if weights is None:
                unknown += wrapper.bias_gate.learns
                continue
            index = weights.index(max(weights))
            if weights[index] < enough:
                open_gates.append((weights[index], ("norm", *wrapper.branch_names)[index], name))
            elif index == 0:
                swaps[id(wrapper)] = wrapper.original
            elif strength == 1:
                _keep_branch(wrapper, index - 1)
                folded += 1
            else:
                held += 1
    if unknown:
        warnings.warn(f"{unknown} gates depend on their input; fold(model, batches) judges them too", stacklevel=3)
    if held:
        warnings.warn(
            f"{held} gates have settled on a branch, at a strength below 1: set_strength(model, 1.0) and fold again",
            stacklevel=3,
        )
    if open_gates and not (swaps or folded or unknown or held):
        weight, branch, name = max(open_gates)
        remedy = "a larger tolerance folds it, and changes the outputs by more" if weight > 0.51 else "it is undecided"
        warnings.warn(
            f"fold changed nothing: no gate has settled within tolerance={tolerance:g}. The nearest is {name!r}, "
            f"whose weight of {branch!r} is {weight:.4g} at least; {remedy}",
            stacklevel=3,
        )
    model = Survey(model).swap(swaps)
    connect_masks(model)
    update_record(model)
    return model


@torch.no_grad()
def _lowest_weights(model: nn.Module, batches: Iterable[Any] | None) -> dict[AutoNorm, list[float]]:
    """For each gate, the smallest value that each weight takes; gates whose range is unknown are left out."""
    lowest: dict[AutoNorm, Tensor] = {}
    depends: list[AutoNorm] = []
    for _, layer in autonorms(model):
        gate = layer.bias_gate
        if not gate.learns:
            if layer.gate.kind == "fixed":
                lowest[layer] = torch.tensor(gate.initial_weights())
        elif layer.gate.granularity == "layer" or not gate.weight_out.any():
            lowest[layer] = torch.softmax(gate.bias_out.float(), dim=-1).cpu()
        else:
            depends.append(layer)
    if depends and batches is not None:

        def watch(gate: nn.Module, args: tuple, kwargs: dict, output: tuple[Tensor, Tensor]) -> None:
            weights = output[1].exp().reshape(-1, gate.choices)
            if len(weights):
                layer, smallest = owner[gate], weights.amin(0).cpu()
                lowest[layer] = torch.minimum(lowest[layer], smallest) if layer in lowest else smallest

        owner = {layer.bias_gate: layer for layer in depends}
        handles = [gate.register_forward_hook(watch, with_kwargs=True) for gate in owner]
        try:
            with undisturbed(model):
                for batch in as_batches(batches):
                    forward(model, batch)
        finally:
            for handle in handles:
                handle.remove()
    return {layer: values.tolist() for layer, values in lowest.items()}


def _keep_branch(layer: AutoNorm, index: int) -> None:
    """Turns a gated layer into one branch alone; the original stays inside, so that `unpatch` still works."""
    name, branch, r2 = layer.branch_names[index], layer.bias_branches[index], layer.r2[index : index + 1].clone()
    layer.become_branch(name, branch)
    layer.r2.copy_(r2)
    config: Any = getattr(layer, "patch_config", None)
    if config is not None:
        layer.patch_config = config.replace(norm=name, gate=GateConfig().to_dict(), branches=[name])
