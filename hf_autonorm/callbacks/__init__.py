"""Callbacks for any `transformers.Trainer`: freezing the gates (AutoNorm-S), walking a model to full strength."""

from .base import LogsBesideLoss, add_to_logs
from .freeze import GateFreezeCallback
from .ramp import StrengthRampCallback

__all__ = ["GateFreezeCallback", "LogsBesideLoss", "StrengthRampCallback", "add_to_logs"]
