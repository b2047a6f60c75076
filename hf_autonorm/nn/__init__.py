"""The layers, usable alone. Nothing here knows of transformers."""

from .autonorm import AutoNorm
from .branches import Branch, DynamicTanh, PointwiseBranch, register_branch
from .selector import NormSelector
from .traits import NormTraits, NotANorm, measure
from .wrapper import Wrapper

__all__ = [
    "AutoNorm",
    "Branch",
    "DynamicTanh",
    "NormSelector",
    "NormTraits",
    "NotANorm",
    "PointwiseBranch",
    "Wrapper",
    "measure",
    "register_branch",
]
