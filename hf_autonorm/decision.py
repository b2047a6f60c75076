"""The freeze decision of a run, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def describe(decision: Mapping[str, Any] | None) -> str:
    """`GateFreezeCallback.decision` in one sentence, for logs, cards and reports."""
    if decision is None:
        return "No freeze decision was reached."
    frozen, decided = decision["frozen"], decision.get("decided", decision["frozen"])
    done = f"{len(decided)} of {decision['layers']} gates frozen" if decided else "no gate frozen"
    entropy, threshold = decision["entropy"], decision["threshold"]
    if entropy is None or math.isnan(entropy):  # of a run that diverged
        compared = f"no number, beside the threshold {threshold:g}"
    else:
        compared = f"{entropy:.4f} nats {'≥' if entropy >= threshold else '<'} threshold {threshold:g}"
    best = (
        f" The best model, loaded at the end, is from before it: {len(frozen)} frozen." if "best" in decision else ""
    )
    return (
        f"{done} at epoch {decision['epoch']:g} (step {decision['step']}): mean gate entropy {compared}, "
        f"rule “{decision['rule']}”.{best}"
    )
