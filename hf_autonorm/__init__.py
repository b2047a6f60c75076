"""Patch pretrained `transformers` and `timm` models with AutoNorm, Dynamic Tanh and affine-like layers, in one line.

from hf_autonorm import patch
model = patch(AutoModel.from_pretrained(name))
"""

__version__ = "0.1.0"

from .callbacks import GateFreezeCallback, StrengthRampCallback
from .config import GateConfig, PatchConfig
from .diagnostics.divergence import diagnose
from .diagnostics.gates import gates
from .diagnostics.stationarity import StationarityCallback
from .hub import loading as _loading  # noqa: F401  registers the door for stock `from_pretrained`
from .hub.card_callback import ModelCardCallback
from .hub.pushing import push_to_hub
from .hub.saving import from_pretrained, save_pretrained
from .nn import register_branch
from .patching.calibrate import calibrate
from .patching.fold import fold
from .patching.surgery import patch, plan, set_strength, unpatch

__all__ = [
    "GateConfig",
    "GateFreezeCallback",
    "ModelCardCallback",
    "PatchConfig",
    "StationarityCallback",
    "StrengthRampCallback",
    "calibrate",
    "diagnose",
    "fold",
    "from_pretrained",
    "gates",
    "patch",
    "plan",
    "push_to_hub",
    "register_branch",
    "save_pretrained",
    "set_strength",
    "unpatch",
]
