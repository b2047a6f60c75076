"""Patch pretrained `transformers` and `timm` models with AutoNorm, Dynamic Tanh and affine-like layers, in one line.

    from hf_autonorm import patch

    model = patch(AutoModel.from_pretrained(name))

A map, from the ground up; each line may import those above it (tests/test_imports.py):

    errors, config   what can go wrong; the settings
    nn               the layers. wrapper.py first: a patch wraps the original module, which stays inside, untouched; at
                     strength 0 it computes what that computed, bit for bit. Then autonorm.py, affine.py, patchnorm.py
    patching         survey.py and targets.py: what can be wrapped, and why not; surgery.py: plan, patch, unpatch;
                     calibrate.py, fold.py; record.py: what was patched, noted in the model's config
    callbacks        freezing and ramps, for any transformers.Trainer
    diagnostics      gates, divergence, dytness, stationarity, and their pictures
    hub              loading.py: the door through which stock `from_pretrained` rebuilds a patched model; saving, model
                     cards, pushing, and the code that travels with a model
    report, demo     a run as one HTML page; the whole way on a real model

To keep in mind before changing anything: no class and no global of torch or transformers is touched, no random number
is drawn outside a training forward, and every tensor that forward needs is in the state dict.
"""

from typing import TYPE_CHECKING, Any

from .config import GateConfig, PatchConfig
from .diagnostics.divergence import diagnose
from .diagnostics.gates import gates
from .hub import loading as _loading  # noqa: F401  registers the door for stock `from_pretrained`
from .hub.pushing import push_to_hub
from .hub.saving import from_pretrained, save_pretrained
from .nn import register_branch
from .patching.calibrate import calibrate
from .patching.fold import fold
from .patching.surgery import patch, plan, set_strength, unpatch
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .callbacks import GateFreezeCallback, StrengthRampCallback
    from .diagnostics.stationarity import StationarityCallback
    from .hub.card_callback import ModelCardCallback

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

# Trainer's imports take as long as those of torch and of the models together: they wait until a callback is asked for.
_CALLBACKS = {
    "GateFreezeCallback": "callbacks",
    "ModelCardCallback": "hub.card_callback",
    "StationarityCallback": "diagnostics.stationarity",
    "StrengthRampCallback": "callbacks",
}


def __getattr__(name: str) -> Any:
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"{__name__}.{_CALLBACKS[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
