"""`hf-autonorm`: a thin face over the verbs of the package. Paths or Hub ids in, folders out.

A package beside hf_autonorm, which registers its door with transformers when it is imported, and so imports torch and
transformers. Here they are imported inside the commands only: `--help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import parts
from .parts import (
    Branches,
    Conv,
    Exclude,
    Gate,
    Granularity,
    Heads,
    Include,
    Json,
    Linear,
    Model,
    Norm,
    NormWeight,
    Out,
    Plot,
    Strength,
    Texts,
)  # fmt: skip

app = typer.Typer(
    name="hf-autonorm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `main` prints errors in one line
    add_completion=False,
    rich_markup_mode="rich",
    help="Patch pretrained transformers and timm models with AutoNorm, Dynamic Tanh and affine-like layers.",
    epilog="Begin with:  hf-autonorm demo   or   hf-autonorm plan sentence-transformers/all-MiniLM-L6-v2",
)
out = parts.out
err = Console(stderr=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("hf_autonorm"))
        raise typer.Exit


@app.callback()
def _common(
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module or .py file that registers branches of your own; may be repeated."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    # `main` reads --debug wherever it stands; it is declared for the help.
    parts.import_files(imports or [])


@app.command(epilog="Example:  hf-autonorm plan bert-base-uncased --norm dyt --include '.*layer.(10|11).*'")
def plan(
    model: Model,
    norm: Norm = "autonorm",
    linear: Linear = "none",
    conv: Conv = "none",
    branches: Branches = "dyt",
    include: Include = None,
    exclude: Exclude = None,
    gate: Gate = "gumbel",
    granularity: Granularity = "token",
    norm_weight: NormWeight = 0.9,
    heads: Heads = False,
    as_json: Json = False,
) -> None:
    """Show what [b]patch[/b] would do, and why it leaves a module alone; [b]--json[/b] gives every module."""
    from hf_autonorm import plan as make_plan

    config = parts.config(norm, linear, conv, branches, include, exclude, gate, granularity, norm_weight, heads, 1.0)
    parts.show(make_plan(parts.load(model), config=config), as_json)


@app.command(epilog="Example:  hf-autonorm patch bert-base-uncased my-bert --norm dyt --texts sentences.txt")
def patch(
    model: Model,
    output: Out,
    norm: Norm = "autonorm",
    linear: Linear = "none",
    conv: Conv = "none",
    branches: Branches = "dyt",
    include: Include = None,
    exclude: Exclude = None,
    gate: Gate = "gumbel",
    granularity: Granularity = "token",
    norm_weight: NormWeight = 0.9,
    heads: Heads = False,
    strength: Strength = 1.0,
    texts: Texts = None,
    as_json: Json = False,
) -> None:
    """Patch a model and save it; with [b]--texts[/b] it is calibrated first, and so stays close to the original."""
    from hf_autonorm import calibrate as fit
    from hf_autonorm import patch as apply
    from hf_autonorm.patching.record import wrappers

    config = parts.config(
        norm, linear, conv, branches, include, exclude, gate, granularity, norm_weight, heads, strength
    )
    loaded = parts.load(model)
    before = len(wrappers(loaded))
    loaded = apply(loaded, config=config)
    report = None
    if len(wrappers(loaded)) == before:
        warnings.warn(f"{model} is patched in this way already; {output} is a copy of it", stacklevel=2)
    elif not texts and strength > 0:
        warnings.warn(
            f"not calibrated: at strength {strength:g} this computes something else than {model}. --texts FILE fits "
            "it to the original, --strength 0 begins at it",
            stacklevel=2,
        )
    if texts:
        batches = parts.batches(loaded, model, texts)
        with parts.passes(loaded, "calibrating", as_json):
            report = fit(loaded, batches)
    parts.save(loaded, output, model)
    if report is None:
        parts.done(output, {"output": str(output)}, as_json)
    else:
        parts.report(report, output, as_json)


@app.command(epilog="Example:  hf-autonorm calibrate my-bert my-bert-calibrated --texts sentences.txt")
def calibrate(model: Model, output: Out, texts: Texts = None, as_json: Json = False) -> None:
    """Fit a patched model's layers to their originals on a few hundred texts, without training, and save it."""
    if texts is None:
        raise typer.BadParameter("give --texts FILE, one example a line; a few hundred are plenty")
    from hf_autonorm import calibrate as fit

    loaded = parts.load(model)
    batches = parts.batches(loaded, model, texts)
    with parts.passes(loaded, "calibrating", as_json):
        report = fit(loaded, batches)
    parts.save(loaded, output, model)
    parts.report(report, output, as_json)


@app.command(epilog="Example:  hf-autonorm gates my-bert --texts sentences.txt --plot gates.png")
def gates(
    model: Model,
    texts: Texts = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show each gate's mean weights and entropy: as saved, or measured over [b]--texts[/b]."""
    from hf_autonorm import gates as look

    loaded = parts.load(model)
    rows = look(loaded, parts.batches(loaded, model, texts) if texts else None)
    if plot is not None:
        rows.plot(str(plot))
    parts.show(rows, as_json)


@app.command(epilog="Example:  hf-autonorm diagnose bert-base-uncased --texts sentences.txt --plot divergence.png")
def diagnose(
    model: Model,
    texts: Texts = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Rank the affine layers by how far their SGD steps are from the gradient's, and the norms by their dytness."""
    if texts is None:
        raise typer.BadParameter("give --texts FILE, one example a line; some dozen are plenty")
    from hf_autonorm import diagnose as look

    loaded = parts.load(model)
    batches = parts.batches(loaded, model, texts)
    with parts.passes(loaded, "diagnosing", as_json):
        diagnosis = look(loaded, batches)
    if plot is not None:
        diagnosis.plot(str(plot))
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        out.print(diagnosis.table())


@app.command(epilog="Example:  hf-autonorm report runs/cifar10/autonorm_s-0")
def report(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run: of training/train.py, or of any Trainer.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; default: FOLDER/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page of a training run: results, curves, gates over time, freeze decision, plan.

    Put [b]hf-autonorm diagnose … --json > FOLDER/diagnosis.json[/b] beside it, and the page ranks the layers too."""
    from hf_autonorm.report import write_report

    written = write_report(folder, output)
    parts.done(written, {"output": str(written)}, as_json)


@app.command(epilog="Example:  hf-autonorm unpatch my-bert my-stock-bert")
def unpatch(model: Model, output: Out, as_json: Json = False) -> None:
    """Take the patch out again; the result is a stock model with its (trained) own norms."""
    from hf_autonorm import unpatch as undo

    parts.save(undo(parts.load(model)), output, model)
    parts.done(output, {"output": str(output)}, as_json)


@app.command(epilog="Example:  hf-autonorm fold my-bert my-fast-bert --texts sentences.txt")
def fold(
    model: Model,
    output: Out,
    texts: Texts = None,
    tolerance: Annotated[float, typer.Option(help="Largest deviation of a gate's weight from 1.")] = 1e-3,
    as_json: Json = False,
) -> None:
    """Collapse the gates that settled: to the original norm, or to one branch; [b]--texts[/b] judges those that depend
    on their input."""
    from hf_autonorm import fold as collapse
    from hf_autonorm.patching.record import wrappers

    loaded = parts.load(model)
    before = len(wrappers(loaded))
    gated = {id(w) for _, w in wrappers(loaded) if not getattr(w, "replaces", True)}
    loaded = collapse(loaded, parts.batches(loaded, model, texts) if texts else None, tolerance)
    left = len(wrappers(loaded))
    parts.save(loaded, output, model)
    if not as_json:
        alone = sum(id(w) in gated and w.replaces for _, w in wrappers(loaded))
        out.print(
            f"Of {before} patched modules {before - left} are the original again, {alone} became one branch.",
            highlight=False,
        )
    parts.done(output, {"output": str(output), "patched_before": before, "patched_after": left}, as_json)


@app.command(epilog="Example:  hf-autonorm push my-bert me/my-bert --private")
def push(
    folder: Annotated[Path, typer.Argument(help="The folder of a saved model.", metavar="DIR", show_default=False)],
    repo: Annotated[
        str, typer.Argument(help="owner/name on the Hub, made if missing.", metavar="REPO", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, made from main if missing; or refs/pr/N.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    as_json: Json = False,
) -> None:
    """Upload a saved model and its card to the Hub, in one commit; after a broken upload, the same again goes on.
    The token is that of [b]hf auth login[/b] or HF_TOKEN."""
    from hf_autonorm import push_to_hub

    commit = push_to_hub(
        folder, repo, private=private or None, revision=revision, create_pr=create_pr, commit_message=message
    )
    facts = {"url": commit.commit_url, "commit": commit.oid, "pull_request": commit.pr_url}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        out.print(f"Pushed: {commit.pr_url or commit.commit_url}", soft_wrap=True, highlight=False)


@app.command(epilog="Example:  hf-autonorm card my-bert --metric accuracy=0.91 --baseline accuracy=0.90")
def card(
    folder: Annotated[Path, typer.Argument(help="The folder of a saved model.", show_default=False)],
    metric: Annotated[list[str] | None, typer.Option(help="name=value of this model; may be repeated.")] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="name=value of the unpatched model.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model it was made from.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub id (or name) of the data.")] = None,
    license: Annotated[str | None, typer.Option(help="For the card's metadata, e.g. apache-2.0.")] = None,
    command: Annotated[str | None, typer.Option(help="The command that trained the model.")] = None,
    as_json: Json = False,
) -> None:
    """Write the model card of a saved model, or bring its part of README.md up to date; your own words stay."""
    from hf_autonorm.errors import NotPatchedError
    from hf_autonorm.hub.cards import BEGIN, write_card
    from hf_autonorm.hub.metadata import read_card, results_in
    from hf_autonorm.hub.reading import local_folder
    from hf_autonorm.patching.record import wrappers

    told, told_of_others = parts.numbers(metric), parts.numbers(baseline)
    folder = local_folder(folder)
    readme = folder / "README.md"
    # The weights are the same, so what was measured of them stays.
    metrics, others, measured_on = results_in(read_card(readme)) if readme.is_file() else ({}, {}, None)
    loaded = parts.load(str(folder))
    ours = readme.is_file() and BEGIN in readme.read_text(encoding="utf-8", errors="replace")
    if not wrappers(loaded) and not ours:
        raise NotPatchedError(f"{folder} is not patched, and hf_autonorm wrote no card for it: its README.md stays")
    written = write_card(
        loaded,
        folder,
        name=folder.resolve().name,
        previous=folder,
        metrics=metrics | told,
        baseline=others | told_of_others,
        base_model=base_model,
        dataset=dataset or measured_on,
        license=license,
        command=command,
    )
    parts.done(readme, {"output": str(readme), "metadata": written.data.to_dict()}, as_json)


@app.command(epilog="Example:  hf-autonorm demo --output runs/demo")
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the model, its card and the plot.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A few words and steps: to see that it runs.")] = False,
    as_json: Json = False,
) -> None:
    """The whole way on a real model: plan, patch, calibrate, train, save, reload. Takes some 3 minutes."""
    from hf_autonorm.demo import run

    results = run(output, quick=quick, console=Console(quiet=as_json))
    if as_json:
        print(json.dumps(results, indent=2))


@app.command(epilog="Example:  hf-autonorm env --json")
def env(as_json: Json = False) -> None:
    """Versions and devices, for a bug report."""
    import platform

    import torch

    from hf_autonorm.hub.facts import versions

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {**versions(), "platform": platform.platform(), "device": device, "threads": torch.get_num_threads()}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            out.print(f"{name:16s} {value}", highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows, and LC_ALL=C, know no →, α or R²
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning
    try:
        app([word for word in arguments if word != "--debug"], prog_name="hf-autonorm")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        words = str(error) or type(error).__name__
        if type(error).__name__ == "NotPatchedError":  # of a package that may not be imported yet
            words += " (here: hf-autonorm patch MODEL OUT)"
        _tell("error", words)
        sys.exit(1)


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    _tell("warning", str(message))


def _tell(kind: str, text: str) -> None:
    words = " ".join(text.split())
    words = f"{kind}: {words[:400]}{'…' if len(words) > 400 else ''}"
    err.print(words, markup=False, highlight=False, soft_wrap=True)
