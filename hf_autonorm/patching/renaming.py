"""Whether the names of a wrapped module survive transformers' conversion of checkpoints.

Many model types rename or rebuild weights between file and model (`conversion_mapping.py`), by patterns on the names.
A name that a pattern catches in the middle would be saved as something else, or taken apart; this is found out before
anything is patched.
"""

from __future__ import annotations

import sys

from torch import nn

from .survey import Target

# One name of each kind of tensor that a wrapper has; what stands below it are the original's own.
_ADDED = ("strength", "bias_gate.weight_in", "bias_branches.0.alpha", "gain")


def mark_renamed(model: nn.Module, targets: list[Target]) -> None:
    """Sets the reason of every target whose wrapped names would not come back from a saved checkpoint."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters, apply_renamings
    except ImportError:  # another version of transformers: nothing is known of its conversions
        return
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model)
    conversions = [c for c in conversions if not isinstance(c, PrefixChange)]  # about the front of a name only
    if not conversions:
        return
    backwards = [c.reverse_transform() for c in conversions[::-1]]
    load_renamings, save_renamings = (
        [c for c in group if not isinstance(c, WeightConverter)] for group in (conversions, backwards)
    )
    load_converters, save_converters = (
        [c for c in group if isinstance(c, WeightConverter)] for group in (conversions, backwards)
    )

    def comes_back(key: str) -> bool:
        converted, by = apply_converters(key, save_converters)
        in_file = apply_renamings(converted, save_renamings)
        loaded, by_loading = apply_converters(apply_renamings(in_file, load_renamings), load_converters)
        return by is None and by_loading is None and loaded == key

    for target in targets:
        if target.reason is None:
            own = (f"original.{name}" for name in target.module.state_dict(keep_vars=True))
            if not all(comes_back(f"{target.name}.{name}") for name in (*own, *_ADDED)):
                target.reason = "transformers renames or rebuilds its weights between file and model"
