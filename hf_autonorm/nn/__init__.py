"""The layers, usable alone. Nothing here knows of transformers."""

from .affine import AffineLike, Correction, NormLike
from .autonorm import AutoNorm
from .branches import Branch, DynamicTanh, PointwiseBranch, register_branch
from .patchnorm import PatchNorm
from .selector import NormSelector
from .traits import NormTraits, NotANorm, measure
from .wrapper import Wrapper

__all__ = [
    "AffineLike",
    "AutoNorm",
    "Branch",
    "Correction",
    "DynamicTanh",
    "NormLike",
    "NormSelector",
    "NormTraits",
    "NotANorm",
    "PatchNorm",
    "PointwiseBranch",
    "Wrapper",
    "measure",
    "register_branch",
]
