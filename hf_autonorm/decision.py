"""The freeze decision of a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe(decision: Mapping[str, Any] | None) -> str:
    """`GateFreezeCallback.decision` in one sentence, for logs, cards and reports."""
    if decision is None:
        return "No freeze decision was reached."
    frozen, decided = decision["frozen"], decision.get("decided", decision["frozen"])
    done = f"{len(decided)} of {decision['layers']} gates frozen" if decided else "no gate frozen"
    sign = "≥" if decision["entropy"] >= decision["threshold"] else "<"
    best = (
        f" The best model, loaded at the end, is from before it: {len(frozen)} frozen." if "best" in decision else ""
    )
    return (
        f"{done} at epoch {decision['epoch']:g} (step {decision['step']}): mean gate entropy "
        f"{decision['entropy']:.4f} nats {sign} threshold {decision['threshold']:g}, rule “{decision['rule']}”.{best}"
    )
