"""The options that commands share, and what they do with them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console(markup=False)  # paths and names of modules may hold brackets

Model = Annotated[str, typer.Argument(help="A folder or a Hub id.", metavar="MODEL", show_default=False)]
Out = Annotated[
    Path, typer.Argument(help="The folder to write; other files in it stay.", metavar="OUT", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and nothing else.")]
Texts = Annotated[
    Path | None,
    typer.Option(
        help="A text file, one example a line, to calibrate or measure on.",
        exists=True,
        dir_okay=False,
        readable=True,
        show_default=False,
    ),
]


def picture(path: Path | None) -> Path | None:
    """Refuses, before the work, a file that cannot be drawn into."""
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("pictures are drawn by matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.lower().lstrip(".") not in FigureCanvasBase.get_supported_filetypes():
        raise typer.BadParameter(f"{path} does not end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


Plot = Annotated[
    Path | None,
    typer.Option(help="Draw it into this file (.png, .svg, .pdf).", callback=picture, show_default=False),
]
Norm = Annotated[
    str, typer.Option(help="autonorm; the name of a branch (dyt, rms_norm, identity, …), which replaces it; none.")
]
Form = Literal["none", "affine_like", "norm_like"]
Linear = Annotated[Form, typer.Option(help="What linear layers become.")]
Conv = Annotated[Form, typer.Option(help="What convolutions become (PatchNorm).")]
Branches = Annotated[str, typer.Option(help="AutoNorm's branches beside the original norm, by commas.")]
Include = Annotated[
    str | None, typer.Option(help="Only modules whose whole dotted name matches this regular expression.")
]
Exclude = Annotated[str | None, typer.Option(help="Not the modules that match this one.")]
Strength = Annotated[float, typer.Option(help="0: the original model, bit for bit; 1: the full formula.")]
Gate = Annotated[Literal["gumbel", "softmax", "hard", "random"], typer.Option(help="How a gate weighs.")]
Granularity = Annotated[Literal["token", "sequence", "layer"], typer.Option(help="What gets weights of its own.")]
NormWeight = Annotated[float, typer.Option(help="The gate's first weight on the original norm.")]
Heads = Annotated[bool, typer.Option("--heads", help="Task heads (classifiers) too.")]


def config(norm, linear, conv, branches, include, exclude, gate, granularity, norm_weight, heads, strength) -> Any:
    from hf_autonorm import GateConfig, PatchConfig

    return PatchConfig(
        norm=None if norm == "none" else norm,
        linear=None if linear == "none" else linear,
        conv=None if conv == "none" else conv,
        branches=[name.strip() for name in branches.split(",")],
        include=include,
        exclude=exclude,
        heads=heads,
        strength=strength,
        gate=GateConfig(kind=gate, granularity=granularity, init_norm_weight=norm_weight),
    )


def import_files(names: list[str]) -> None:
    """Imports modules (of the present folder, too) or .py files, for the branches that they register."""
    if names:
        sys.path.append(os.getcwd())
    for name in names:
        if not name.endswith(".py"):
            importlib.import_module(name)
            continue
        path = Path(name).resolve()
        if not path.is_file():
            raise typer.BadParameter(f"--import {name}: there is no such file")
        known = sys.modules.get(path.stem)
        if known is not None and getattr(known, "__file__", None) == str(path):
            continue
        if known is not None or path.stem in sys.stdlib_module_names:
            raise typer.BadParameter(f"--import {name}: there is a module {path.stem} already; rename the file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def load(path: str) -> Any:
    from transformers.utils import logging

    from hf_autonorm import from_pretrained

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return from_pretrained(path)


def batches(model: Any, path: str, texts: Path, size: int = 32) -> list[Any]:
    """Tokenized batches, for the model of the folder `path`, of a text file's lines, at most 512 of them.

    A model of an encoder and a decoder reads each line with both."""
    from hf_autonorm.errors import ConfigError
    from hf_autonorm.hub.reading import load_tokenizer

    try:
        text = texts.read_text(encoding="utf-8-sig")  # Windows' editors begin a file with a mark of its encoding
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        raise ConfigError(f"--texts {texts}: {why}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()][:512]
    if not lines:
        raise ConfigError(f"--texts {texts}: it holds no text; one example a line is wanted")
    tokenizer = load_tokenizer(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    limit = min(tokenizer.model_max_length, 512)
    found = [
        dict(tokenizer(part, padding=True, truncation=True, max_length=limit, return_tensors="pt")) for part in parts
    ]
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        for batch in found:
            batch["decoder_input_ids"] = batch["input_ids"]
            batch["decoder_attention_mask"] = batch["attention_mask"]
    return found


@contextlib.contextmanager
def passes(model: Any, what: str, as_json: bool) -> Iterator[None]:
    """A line on stderr that counts the model's forward passes while `what` goes on; nothing with --json."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed} forward passes"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task(what, total=None)
        handle = model.register_forward_hook(lambda *_: progress.advance(task))
        try:
            yield
        finally:
            handle.remove()


def save(model: Any, output: Path, source: str) -> None:
    from hf_autonorm import save_pretrained

    save_pretrained(model, output, files_from=source)


def numbers(pairs: list[str] | None) -> dict[str, float]:
    numbers = {}
    for pair in pairs or []:
        name, _, value = pair.partition("=")
        try:
            if not name:
                raise ValueError
            numbers[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{pair!r} is not name=value with a number, e.g. accuracy=0.91") from None
    return numbers


def show(rows: Any, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        out.print(rows.table())


def report(report: Any, output: Path, as_json: bool) -> None:
    from dataclasses import asdict

    if not as_json:
        out.print(report.table())
    done(output, {"output": str(output), **asdict(report)}, as_json)


def done(path: Path, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        out.print(f"Written: {path}", soft_wrap=True)
