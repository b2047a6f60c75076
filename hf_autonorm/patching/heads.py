"""Which modules of a model are its output head: the last thing to change in it, and never the output embeddings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from torch import nn

OUTPUT_EMBEDDINGS = "output embeddings (resized and tied by the library)"
TASK_HEAD = "task head (heads=True patches it)"

# For headed models whose parts are not under one base model (T5ForQuestionAnswering).
_HEAD_NAMES = re.compile(r"(.*_)?(head|heads|classifier|score|qa_outputs)")


def heads(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The reason to leave a module alone, by its id, for every module that is an output embedding or in a task head.

    In transformers the head is what a model has beside its base model; in timm it is `get_classifier()`. Modules of
    neither library have none.
    """
    found: dict[int, str] = {}
    for module in modules:
        for head in (*_transformers_heads(module), *_timm_heads(module)):
            found.update({id(m): TASK_HEAD for m in head.modules()})
    for module in modules:
        embeddings = _output_embeddings(module)
        if isinstance(embeddings, nn.Module):
            found[id(embeddings)] = OUTPUT_EMBEDDINGS
    return found


def _is_pretrained_model(module: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    if not _is_pretrained_model(module):
        return None
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # some composite models ask a part that has none
        return None


def _transformers_heads(module: nn.Module) -> list[nn.Module]:
    if not _is_pretrained_model(module):
        return []
    base = module.base_model
    if base is not module:
        return [child for child in module.children() if child is not base]
    headed = "For" in type(module).__name__
    return [child for name, child in module.named_children() if headed and _HEAD_NAMES.fullmatch(name)]


def _timm_heads(module: nn.Module) -> list[nn.Module]:
    library = type(module).__module__.partition(".")[0]
    if library != "timm" or not callable(getattr(module, "get_classifier", None)):
        return []
    try:
        classifier = module.get_classifier()
    except (AttributeError, TypeError, NotImplementedError):
        return []
    parts = classifier if isinstance(classifier, (tuple, list)) else [classifier]
    return [part for part in parts if isinstance(part, nn.Module)]
