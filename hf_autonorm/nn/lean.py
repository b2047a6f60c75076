"""When AutoNorm may run as one function (`functional.py`), and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .branches import BRANCHES, Branch
from .functional import CURVES, Draw, Form, MixFunction
from .fused import as_one_function, choose_engine
from .selector import gumbel_like
from .traits import lay_out
from .wrapper import ordinary, own_parameter, unhooked

if TYPE_CHECKING:
    from .autonorm import AutoNorm


def lean_forward(layer: AutoNorm, x: Tensor, argument: str | None) -> Tensor | None:
    """What `layer` computes at its strength > 0, as one autograd function; None where it is not known to be the same.

    It is for a norm in closed form (`ClosedForm`) or none, one pointwise branch of this package, plain tensors, no
    hooks inside. Everything else, traced code and transformed functions (`torch.func`, forward mode) take the general
    path. `argument`: the name that the caller gave x, if any.
    """
    branch, known = layer.bias_branches[0], layer._closed_form
    if not _plain(layer, branch, x) or not as_one_function(layer.fused, x):
        return None
    if argument is not None and (known is None or argument != known.argument):
        return None
    alone = layer.replaces and layer._is_one
    own = (None, None)
    form = Form(layer.branch_names[0])
    if not alone:
        if known is None or not known.holds(layer.original) or (x.dtype == torch.float64 and not known.double):
            return None
        # Attributes: in a replica of nn.DataParallel and under FSDP they are no parameters.
        own = tuple(None if name is None else getattr(layer.original, name) for name in (known.weight, known.bias))
        if any(p is not None and (p.dtype != x.dtype or not own_parameter(p, x)) for p in own):
            return None
        form = Form(layer.branch_names[0], known.centered, float(getattr(layer.original, known.eps)), known.offset)
    elif x.numel() == 0 or layer._output_dtype(x, layer.original) != x.dtype:
        return None
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        y = _run(layer, branch, form, own, x.movedim(layer.channel_axis, -1), wide)
    return lay_out(y.movedim(-1, layer.channel_axis), x, layer.layout)


def _run(layer: AutoNorm, branch: Branch, form: Form, own: tuple, rows: Tensor, wide: torch.dtype) -> Tensor:
    gate, selector = layer.bias_gate, (None,) * 4
    shift = getattr(branch, "shift", None)
    mix = (*own, branch.weight, branch.bias, branch.slope(wide), shift)
    draw, noise, weights, log_p = Draw(), None, None, None
    idle = ()
    if form.centered is None:
        idle = tuple(layer.original.parameters()) if layer.training else ()
    elif gate.learns and layer.gate.granularity == "token":
        noisy = layer.training and not layer._is_frozen
        if noisy and layer.gate.kind in ("gumbel", "hard"):
            noise = gumbel_like(torch.empty(*rows.shape[:-1], 2, dtype=wide, device=rows.device)).view(-1, 2)
        selector = (gate.weight_in, gate.bias_in, gate.weight_out, gate.bias_out)
        draw = Draw(layer.gate.kind == "hard", layer.gate.tau, layer.training and layer._is_frozen)
    else:
        mask = None if layer.mask_holder is None else layer.mask_holder.mask
        weights, log_p = gate(
            rows.to(wide),
            mask,
            frozen=layer.frozen if layer.training and layer._is_frozen else None,
            noisy=layer.training and not layer._is_frozen,
        )
        weights = weights.view(1, 2) if weights.dim() == 1 else weights.expand(*rows.shape[:-1], 2).reshape(-1, 2)
    engine = choose_engine(layer.fused, form, rows, mix)
    strength = layer._values["strength"]
    y, own_log_p = MixFunction.apply(engine, form, draw, strength, noise, weights, rows, *mix, *selector, *idle)
    log_p = log_p if own_log_p is None else own_log_p
    if log_p is not None and rows.numel():
        layer._record(log_p)
    return y


def _plain(layer: AutoNorm, branch: Branch, x: Tensor) -> bool:
    """Whether nothing but the formula is wanted of this call."""
    name = layer.branch_names[0]
    if len(layer.branch_names) > 1 or name not in CURVES or type(branch) is not BRANCHES.get(name):
        return False
    if not ordinary(x) or x.device != layer.strength.device:
        return False
    if x.dim() <= layer.channel_axis or not x.dim() or x.shape[layer.channel_axis] != layer.width:
        return False
    # Under autocast a norm may turn half precision into single; what is single stays so (`closed_form` has tried).
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        return False
    return all(unhooked(m) for m in (layer.bias_gate, branch)) and all(
        own_parameter(p, x) for m in (layer.bias_gate, branch) for p in m._parameters.values() if p is not None
    )
