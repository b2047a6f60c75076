"""Callbacks for any `transformers.Trainer`: freezing the gates (AutoNorm-S), walking a model to full strength."""

from .base import LogsBesideLoss
from .freeze import GateFreezeCallback
from .ramp import StrengthRampCallback

__all__ = ["GateFreezeCallback", "LogsBesideLoss", "StrengthRampCallback"]
