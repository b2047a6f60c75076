"""The errors of hf_autonorm.

Each message names the module, the rule and the remedy; all are raised before anything is changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoNormError(ValueError):
    """Base class, so that one `except` catches whatever this package refuses."""


class ConfigError(AutoNormError):
    """A setting is unknown or out of range."""


class NoMatchError(AutoNormError):
    """A rule (`include`, `exclude`, `norm`, …) matches nothing in the model."""


class UnsupportedError(AutoNormError):
    """The setting is valid, but not on this model (a `sequence` gate on a causal decoder, say)."""


class CheckpointError(AutoNormError):
    """A checkpoint and the patch it is to be loaded with do not belong together."""


class NotPatchedError(AutoNormError):
    """The model holds no layer of hf_autonorm."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """`"nearest: 'a', 'b'"`: the known names most like `word`, for the end of an error message."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=count, cutoff=0.4) or known[:count]
    return "nearest: " + ", ".join(repr(name) for name in close)
