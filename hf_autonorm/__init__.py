"""Patch pretrained `transformers` and `timm` models with AutoNorm, Dynamic Tanh and affine-like layers, in one line.

    from hf_autonorm import patch
    model = patch(AutoModel.from_pretrained(name))
"""

__version__ = "0.1.0"

from .config import GateConfig, PatchConfig
from .nn import register_branch
from .patching.calibrate import calibrate
from .patching.surgery import patch, plan, set_strength, unpatch

__all__ = [
    "GateConfig",
    "PatchConfig",
    "calibrate",
    "patch",
    "plan",
    "register_branch",
    "set_strength",
    "unpatch",
]
