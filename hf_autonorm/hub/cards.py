"""The model card, filled from what really happened; an existing README.md keeps its own words."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from torch import nn

from ..nn.affine import Correction
from ..nn.autonorm import AutoNorm, autonorms
from ..patching.record import wrappers
from .custom_code import CODE_FILE
from .facts import TrainingFacts, calls, duration, evaluation_table, patched_groups, versions, without_secrets
from .metadata import CardError, base_of, check_numbers, dataset_parts, eval_results, merge, metric_type, read_card
from .metadata import pipeline_tag as pipeline_tag_of
from .snippets import auto_class, snippet

if TYPE_CHECKING:
    from ..callbacks import GateFreezeCallback

BEGIN = "<!-- hf_autonorm: begin. This part is rewritten on every save; your own words go above or below. -->"
END = "<!-- hf_autonorm: end -->"
_SECTION = re.compile(re.escape("<!-- hf_autonorm: begin") + r".*?" + re.escape(END), re.DOTALL)
_PAPERS = {
    "autonorm": "AutoNorm and AutoNorm-S: [arXiv:2607.10593](https://arxiv.org/abs/2607.10593)",
    "dyt": "Dynamic Tanh: [arXiv:2503.10622](https://arxiv.org/abs/2503.10622)",
    "adanorm": "AdaNorm: [arXiv:1911.07013](https://arxiv.org/abs/1911.07013)",
    "film": "FiLM: [arXiv:1709.07871](https://arxiv.org/abs/1709.07871)",
    "affine": "Affine-like and norm-like layers: [arXiv:2512.22247](https://arxiv.org/abs/2512.22247)",
}


def write_card(
    model: nn.Module,
    folder: Path,
    *,
    name: str,
    previous: Path | None = None,
    repo_id: str | None = None,
    metrics: Mapping[str, float] | None = None,
    baseline: Mapping[str, float] | None = None,
    base_model: str | None = None,
    dataset: str | Mapping[str, str] | None = None,
    command: str | None = None,
    callbacks: Iterable[Any] | None = None,
    license: str | None = None,
) -> ModelCard:
    """Writes `folder/README.md` (and the pictures it shows) for `model`; returns the card.

    Args:
        folder: where the model's files are already; the snippet is made for what is there.
        name: of the model, for headings, model-index and the snippet's path.
        previous: folder whose README.md is brought up to date; its text outside our marks and its metadata stay.
        repo_id: where the model is on the Hub; the snippet loads it from there.
        others: see `save_pretrained`.

    Raises CardError, before anything is written, where the metadata would not be valid.
    """
    callbacks = list(callbacks or [])
    told = (getattr(callback, "facts", None) for callback in callbacks)
    facts = next((facts for facts in told if isinstance(facts, TrainingFacts)), TrainingFacts())
    metrics = check_numbers("metrics", facts.metrics if metrics is None else metrics)
    baseline = check_numbers("baseline", facts.baseline if baseline is None else baseline)
    if metrics and baseline and not metrics.keys() & baseline.keys():
        warnings.warn(
            f"metrics and baseline share no name ({', '.join(metrics)}; {', '.join(baseline)}), so the card compares "
            "nothing; give both the same names",
            stacklevel=3,
        )
    base_model, license = base_model or facts.base_model, license or facts.license
    dataset, command = dataset or facts.dataset, without_secrets(command or facts.command)
    old = None
    if previous is not None and (previous / "README.md").is_file():
        old = read_card(previous / "README.md")
    known_base, known_license = base_of(model)
    base = base_model or known_base
    if base is None and old is not None:
        old_base = old.data.to_dict().get("base_model")
        base = (
            old_base[0] if isinstance(old_base, list) and old_base else old_base if isinstance(old_base, str) else None
        )
    parts, task = dataset_parts(dataset), pipeline_tag_of(model)
    patched = bool(wrappers(model))
    label = "patched" if patched else "this model"
    ours = {
        "base_model": base,
        "library_name": "hf_autonorm" if patched else "transformers" if hasattr(model, "config") else None,
        "license": license or known_license,
        "pipeline_tag": task,
        "tags": _tags(model),
        "datasets": [parts["hub_id"]] if parts["hub_id"] else [],
        "metrics": [metric_type(n) for n, value in metrics.items() if math.isfinite(value)],
        "eval_results": eval_results(metrics, baseline, parts, task or "other", label),
        "model_name": name,
    }
    given = {k for k, v in {"base_model": base_model, "license": license}.items() if v is not None}
    data = merge(old, ours, given)
    has_own_heading = old is not None and re.search(r"^# ", _SECTION.sub("", old.text), re.MULTILINE)
    fresh = ModelCard.from_template(
        data,
        template_str=_with_filters(template()),
        begin=BEGIN,
        end=END,
        heading=None if has_own_heading else name,
        model_class=type(model).__name__,
        architecture=(getattr(model, "pretrained_cfg", None) or {}).get("architecture"),
        base_model=base,
        snippet=snippet(model, folder, repo_id or name),
        trusted=auto_class(type(model).__name__) if (folder / CODE_FILE).is_file() else None,
        path=repo_id or name,
        groups=patched_groups(model),
        calls=calls(model),
        strength=_strengths(model),
        label=label,
        results=_results(metrics, baseline),
        has_baseline=bool(baseline),
        not_finite=sorted({n for d in (metrics, baseline) for n, v in d.items() if not math.isfinite(v)}),
        dataset=parts["name"] if dataset else None,
        split=parts.get("split"),
        command=command,
        hyperparameters=[(name, str(value)) for name, value in facts.hyperparameters.items()],
        evaluations=evaluation_table(facts.evaluations),
        examples=facts.examples,
        duration=duration(facts.seconds),
        hardware=facts.hardware,
        resumed_from=facts.resumed_from,
        versions=", ".join(f"{package} {number}" for package, number in versions().items()),
        papers=_papers(model),
        **_gate_facts(model, folder, callbacks),
    )
    fresh.data = data
    fresh.text = _splice(None if old is None else old.text, re.sub(r"\n{3,}", "\n\n", fresh.text))
    fresh.save(folder / "README.md")
    return fresh


def template() -> str:
    """The template's text: beside this file in an installed wheel, in `model_cards/` of a checkout."""
    here = Path(__file__).resolve()
    for path in (here.with_name("template.md"), here.parents[2] / "model_cards" / "template.md"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise CardError("the card template is missing from this installation; reinstall hf_autonorm")


def _with_filters(text: str) -> str:
    """`ModelCard.from_template` takes no filters: a cell's text must not end the cell."""
    return text.replace("| cell }}", "| replace('|', '\\\\|') }}")


def _splice(old: str | None, new: str) -> str:
    section = _SECTION.search(new).group(0)
    if old is None:
        return "\n" + section + "\n"
    line_break = "\r\n" if "\r\n" in old else "\n"
    section = section.replace("\n", line_break)
    if _SECTION.search(old):
        return _SECTION.sub(lambda _: section, old, count=1)
    return old.rstrip() + line_break * 2 + section + line_break


def _tags(model: nn.Module) -> list[str]:
    found = [m for _, m in wrappers(model)]
    names = ["autonorm", "hf_autonorm"] if found else []
    names += sorted({branch for m in found if isinstance(m, AutoNorm) for branch in m.branch_names})
    if any(isinstance(m, Correction) for m in found):
        names.append("affine-divergence")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return [*names, *([model_type] if model_type else [])]


def _papers(model: nn.Module) -> list[str]:
    found = [m for _, m in wrappers(model)]
    norms = [m for m in found if isinstance(m, AutoNorm)]
    keys = ["autonorm"] if any(not m.replaces for m in norms) else []
    keys += sorted({branch for m in norms for branch in m.branch_names})
    keys += ["affine"] if any(isinstance(m, Correction) for m in found) else []
    return [_PAPERS[key] for key in keys if key in _PAPERS]


def _strengths(model: nn.Module) -> str:
    values = sorted({m.scalar("strength") for _, m in wrappers(model)})
    return " to ".join(f"{value:g}" for value in dict.fromkeys([*values[:1], *values[-1:]]))


def _results(metrics: dict[str, float], baseline: dict[str, float]) -> list[dict[str, str]]:
    rows = []
    for name in dict.fromkeys([*metrics, *baseline]):
        value, other = metrics.get(name), baseline.get(name)
        both = value is not None and other is not None
        rows.append(
            {
                "name": name,
                "value": "" if value is None else f"{value:.6g}",
                "baseline": "" if other is None else f"{other:.6g}",
                "difference": f"{value - other:+.4g}" if both else "",
            }
        )
    return rows


def _gate_facts(model: nn.Module, folder: Path, callbacks: list[Any]) -> dict[str, Any]:
    """Gate table, freeze decision and pictures; nothing where no gate learns."""
    from ..diagnostics.gates import Gates, gates

    rows = Gates(row for row in (gates(model) if autonorms(model) else []) if row.learns)
    if not rows:
        return {"gates": []}
    watcher = _watcher(callbacks)
    frozen = sum(row.frozen for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row.weights))
    return {
        "gates": [
            {
                "name": row.name,
                "weights": [f"{row.weights[n]:.4f}" if n in row.weights else "" for n in names],
                "entropy": f"{row.entropy:.4f}",
                "frozen": "yes" if row.frozen else "no",
                "r2": "" if row.r2 is None else " ".join(f"{value:.4f}" for value in row.r2.values()),
            }
            for row in rows
        ],
        "gate_names": names,
        "has_r2": any(row.r2 is not None for row in rows),
        "mean_weight": f"{sum(row.weights['norm'] for row in rows) / len(rows):.4f}",
        "mean_entropy": f"{sum(row.entropy for row in rows) / len(rows):.4f}",
        "freeze": "Freeze decision: "
        + (watcher.describe() if watcher else f"{frozen} of {len(rows)} gates are frozen."),
        "plots": _draw(rows, watcher, folder),
    }


def _watcher(callbacks: list[Any]) -> GateFreezeCallback | None:
    if not callbacks:
        return None
    from ..callbacks import GateFreezeCallback  # costs Trainer's imports, which whoever has callbacks has paid

    return next((callback for callback in callbacks if isinstance(callback, GateFreezeCallback)), None)


def _draw(rows: Any, watcher: GateFreezeCallback | None, folder: Path) -> list[dict[str, str]]:
    try:
        import matplotlib  # noqa: F401

        from ..diagnostics.plots import plot_gate_history, plot_gates
    except ImportError:
        return []
    assets = folder / "assets"
    assets.mkdir(exist_ok=True)
    plot_gates(rows, str(assets / "gates.png"))
    plots = [{"text": "Gate weights and entropy by layer", "file": "assets/gates.png"}]
    if watcher is not None and len(watcher.history) > 1:
        plot_gate_history(watcher.history, watcher.decision, str(assets / "gate_history.png"))
        plots.append({"text": "Gates over training", "file": "assets/gate_history.png"})
    return plots
