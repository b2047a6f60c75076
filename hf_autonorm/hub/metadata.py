"""The metadata of a model card: built from what is known, merged with what stands there, checked before writing."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from ..errors import AutoNormError
from ..nn.branches import BRANCHES

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PIPELINE_TAGS = {  # by the end of the class name
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSemanticSegmentation": "image-segmentation",
    "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
NOT_STATED = "not stated"  # instead of a dataset's name, which the metadata must have
OUR_TAGS = ("autonorm", "hf_autonorm", "affine-divergence")  # gone from the card when the patch is
_WRITTEN = re.compile(r"(.*) \((patched|this model|baseline, not patched)\)")  # a metric's name, as we write it
_LISTS_OF_STRINGS = ("tags", "datasets", "metrics")
_STRINGS_OR_LISTS = ("language", "license", "base_model", "library_name", "pipeline_tag")


class CardError(AutoNormError):
    """The model card cannot be written as asked; what is wrong, and the remedy."""


def pipeline_tag(model: nn.Module) -> str | None:
    """The Hub's name of what the model does, where the class tells."""
    from .saving import is_timm

    if is_timm(model):
        return "image-classification" if getattr(model, "num_classes", 0) else "image-feature-extraction"
    name = type(model).__name__
    return next((tag for end, tag in _PIPELINE_TAGS.items() if name.endswith(end)), None)


def base_of(model: nn.Module) -> tuple[str | None, str | None]:
    """(Hub id, license) of the model this one was made from, as far as it is written down."""
    path = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    readme = Path(path, "README.md") if path else None
    if readme is not None and readme.is_file():
        license = read_card(readme).data.to_dict().get("license")
        return None, license if isinstance(license, str) else None
    # timm writes an id into every model of an architecture, pretrained or not: it says nothing of these weights.
    return path if _HUB_ID.fullmatch(path) and "/" in path and not Path(path).exists() else None, None


def read_card(path: Path) -> ModelCard:
    """A README.md, with or without metadata, however odd (`ModelCard.load` warns or fails on some)."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if not re.match(r"\s*---\s*\n", text):
            text = "---\n{}\n---\n" + text
        return ModelCard(text, ignore_metadata_errors=True)
    except Exception as error:  # yaml's errors have no common base that huggingface_hub exports
        raise CardError(
            f"the metadata of {path.name} cannot be read ({' '.join(str(error).split())[:200]}); mend or delete it"
        ) from error


def check_numbers(what: str, values: Mapping[str, Any] | None) -> dict[str, float]:
    """`{name: value}` as Python floats (ints stay ints); CardError where a value is no number."""
    if values is not None and not isinstance(values, Mapping):
        raise CardError(f"{what}={values!r} must be a dict of numbers, like {{'accuracy': 0.91}}")
    numbers = {}
    for name, value in (values or {}).items():
        if hasattr(value, "item"):
            with contextlib.suppress(ValueError, RuntimeError):  # scores by class: more than one number
                value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CardError(f"{what}[{name!r}]={value!r} must be a number")
        numbers[str(name)] = value
    # `eval_accuracy` of this model stands beside `accuracy` of the baseline, unless `test_accuracy` is there as well.
    short = [metric_type(name) for name in numbers]
    return {s if short.count(s) == 1 else name: value for s, (name, value) in zip(short, numbers.items())}


def dataset_parts(dataset: str | Mapping[str, str] | None) -> dict[str, str | None]:
    """type (an id), name, config, split of a dataset given by its id, by a free name or as those parts."""
    if not isinstance(dataset, (str, Mapping, type(None))):
        raise CardError(
            f"dataset={dataset!r:.200} must be a Hub id, a name, or a dict of type, name, config and split"
        )
    parts = {"type": dataset} if isinstance(dataset, str) else dict(dataset or {})
    unknown = set(parts) - {"type", "name", "config", "split", "revision"}
    if unknown:
        raise CardError(f"dataset has the keys {sorted(unknown)}; known are type, name, config, split and revision")
    if wrong := [key for key, value in parts.items() if not isinstance(value, (str, type(None)))]:
        raise CardError(f"dataset: {wrong[0]}={parts[wrong[0]]!r:.200} must be a word")
    name = parts.get("name") or parts.get("type") or NOT_STATED
    given = parts.get("type") or name
    hub_id = given if _HUB_ID.fullmatch(given) else None
    slug = re.sub(r"[^\w./-]+", "-", given).strip("-").lower()
    return {**parts, "name": name, "type": hub_id or slug, "hub_id": hub_id if "type" in parts else None}


def eval_results(
    metrics: Mapping[str, float],
    baseline: Mapping[str, float],
    dataset: Mapping[str, str | None],
    task: str,
    label: str,
) -> list[EvalResult]:
    """One row a number. The metric's name tells this model from the baseline: model-index merges rows of one dataset
    and keeps nothing else apart."""
    rows = []
    for values, whose in ((metrics, label), (baseline, "baseline, not patched")):
        for name, value in values.items():
            if math.isfinite(value):  # YAML's .nan is refused by the Hub
                rows.append(
                    EvalResult(
                        task_type=task,
                        dataset_type=dataset["type"],
                        dataset_name=dataset["name"],
                        dataset_config=dataset.get("config"),
                        dataset_split=dataset.get("split"),
                        dataset_revision=dataset.get("revision"),
                        metric_type=metric_type(name),
                        metric_name=f"{name} ({whose})",
                        metric_value=value,
                    )
                )
    return rows


def results_in(card: ModelCard) -> tuple[dict[str, float], dict[str, float], dict[str, str] | None]:
    """(metrics, baseline, dataset) that the card's metadata holds, as `eval_results` wrote them."""
    ours: dict[str, float] = {}
    baseline: dict[str, float] = {}
    dataset = None
    for result in card.data.eval_results or []:
        written = _WRITTEN.fullmatch(result.metric_name or "")
        if written is None:
            continue  # the user's own
        (baseline if _of_baseline(written) else ours)[written[1]] = result.metric_value
        if result.dataset_name != NOT_STATED:
            # A name alone has its slug for a type, which is no Hub id.
            parts = {"type": result.dataset_type if "/" in result.dataset_type else None, "name": result.dataset_name}
            parts |= {"config": result.dataset_config, "split": result.dataset_split}
            dataset = {key: value for key, value in parts.items() if value is not None}
    return ours, baseline, dataset


def _of_baseline(written: re.Match[str]) -> bool:
    return written[2].startswith("baseline")


def metric_type(name: str) -> str:
    return name.removeprefix("eval_").removeprefix("test_")


def merge(previous: ModelCard | None, ours: dict[str, Any], given: set[str]) -> ModelCardData:
    """`ours` into the metadata that stands there: the user's words win where they did not come through this call
    (`given`), lists are united, our results are renewed, unknown keys stay."""
    old = {} if previous is None else previous.data.to_dict()
    old.pop("model-index", None)
    old_results = [] if previous is None else previous.data.eval_results or []
    # What an earlier save said of its own weights is not true of these; the baseline has not changed.
    names = [_WRITTEN.fullmatch(r.metric_name or "") for r in old_results]
    old_results = [r for r, written in zip(old_results, names) if written is None or _of_baseline(written)]
    left_behind = set(OUR_TAGS)
    if ours.get("library_name") != "hf_autonorm" and "hf_autonorm" in _as_list(old.get("library_name")):
        # The patch was taken out: its branches' names and the patched model's results say nothing of this model.
        old.pop("library_name")
        left_behind |= set(BRANCHES)
    old_name = None if previous is None else previous.data.model_name
    new = {key: value for key, value in ours.items() if value not in (None, [], "")}
    results, name = new.pop("eval_results", []), new.pop("model_name")
    merged: dict[str, Any] = {key: value for key, value in old.items() if value is not None}
    for key in _LISTS_OF_STRINGS:
        wanted = _as_list(new.pop(key, None))
        kept_words = [word for word in _as_list(old.get(key)) if word not in left_behind or word in wanted]
        united = [*kept_words, *wanted]
        merged.pop(key, None)
        if united:
            merged[key] = list(dict.fromkeys(united))
    for key, value in new.items():
        # A stock library name would make the Hub show a snippet that loads the model without its patch.
        if key in given or key == "library_name" or key not in merged:
            merged[key] = value
    kept = [o for o in old_results if not any(o.is_equal_except_value(n) for n in results)]
    if kept or results:
        merged["eval_results"], merged["model_name"] = [*kept, *results], old_name or name
    data = ModelCardData(**merged)
    check_metadata(data.to_dict())
    return data


def _as_list(value: Any) -> list[str]:
    return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]


def check_metadata(data: dict[str, Any]) -> None:
    """The Hub's own rules for a card's header, before anything is written; raises CardError naming the key."""
    for key in _LISTS_OF_STRINGS:
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise CardError(f"metadata {key}={value!r} must be a list of words")
    for key in _STRINGS_OR_LISTS:
        value = data.get(key, "-")
        words = value if isinstance(value, list) and key in ("language", "base_model", "license") else [value]
        if not words or not all(isinstance(v, str) and v for v in words):
            raise CardError(f"metadata {key}={value!r} must be a word")
    for word in _as_list(data.get("base_model")):
        if not _HUB_ID.fullmatch(word):
            raise CardError(f"metadata base_model={word!r} must be a Hub id (owner/name), not a path or a sentence")
    if "widget" in data and not isinstance(data["widget"], list):
        raise CardError(f"metadata widget={data['widget']!r} must be a list")
    for entry in data.get("model-index", []):
        if not entry.get("name"):
            raise CardError("metadata model-index needs a name: name the model's folder")
        for result in entry["results"]:
            if not isinstance(result["dataset"].get("config", ""), str):
                raise CardError(f"metadata model-index: dataset config {result['dataset']['config']!r} must be a word")
    nulls = [path for path, value in _leaves(data) if value is None]
    if nulls:
        raise CardError(f"metadata {nulls[0]} is empty; fill it in or delete it")


def _leaves(value: Any, path: str = ""):
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
