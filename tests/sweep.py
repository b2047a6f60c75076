"""The sweep over every architecture: `make sweep`, or `python -m tests.sweep [--workers 2] [--only NAME …]`.

One process a model, with a time limit; results go line by line to `runs/sweep.jsonl`, so that a sweep that was stopped
goes on where it was. At its end it writes `tests/COVERAGE.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COVERAGE = ROOT / "tests" / "COVERAGE.md"


def entries(heads: bool) -> list[str]:
    """Ids of all models: `transformers/NAME/HEAD` and `timm/NAME`. heads=False: one head a model type."""
    from tests.zoo import every

    chosen, seen = [], set()
    for entry in every():
        key = (entry.library, entry.name)
        if heads or key not in seen:
            chosen.append(str(entry))
        seen.add(key)
    return chosen


def check_one(identifier: str, settings: list[str]) -> dict[str, Any]:
    """All settings on one model, in this process."""
    from tests.guarantees import check
    from tests.zoo import Entry

    entry = Entry(*identifier.split("/"))
    record: dict[str, Any] = {"id": identifier, "built": False, "settings": {}}
    start = time.time()
    try:
        entry.build()
        record["built"] = True
        for setting in settings:
            record["settings"][setting] = check(entry.build, setting).to_dict()
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        record["where"] = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames]
    record["seconds"] = round(time.time() - start, 1)
    return record


def _work(identifier: str, settings: list[str], out: Any) -> None:
    import torch

    torch.set_num_threads(1)
    out.put(check_one(identifier, settings))


def sweep(
    identifiers: list[str], settings: list[str], results: Path, workers: int, limit: float
) -> list[dict[str, Any]]:
    """Checks what is not in `results` yet; returns all records, in the order of `identifiers`.

    limit: seconds of wall-clock time for each model.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    _warm_up()
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if results.exists():
        done = {r["id"]: r for r in map(json.loads, results.read_text().splitlines())}
    # A record without some of the settings is completed; one that ended in an error stands.
    lacking = {i: [s for s in settings if s not in done.get(i, {}).get("settings", {})] for i in identifiers}
    pending = [i for i in identifiers if lacking[i] and "error" not in done.get(i, {})]
    context = multiprocessing.get_context("fork")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    running: list[tuple[str, Any, Any, float]] = []
    with Progress(*columns) as progress, results.open("a") as file:
        task = progress.add_task("sweep", total=len(identifiers), completed=len(identifiers) - len(pending))
        while pending or running:
            while pending and len(running) < workers:
                identifier = pending.pop(0)
                queue = context.SimpleQueue()
                process = context.Process(target=_work, args=(identifier, lacking[identifier], queue), daemon=True)
                process.start()
                running.append((identifier, process, queue, time.time()))
                progress.update(task, description=identifier)
            for item in list(running):
                identifier, process, queue, start = item
                record = None
                if not queue.empty():
                    record = queue.get()
                elif time.time() - start > limit:
                    record = _no_result(identifier, f"no result in {limit:g} s")
                elif not process.is_alive() and queue.empty():
                    record = _no_result(identifier, f"died ({process.exitcode})")
                if record is not None:
                    process.kill()
                    process.join()
                    running.remove(item)
                    record["settings"] = done.get(identifier, {}).get("settings", {}) | record["settings"]
                    done[identifier] = record
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    progress.advance(task)
            time.sleep(0.02)
    return [done[i] for i in identifiers if i in done]


def _warm_up() -> None:
    """Imports and computes once what every child needs. No backward: after one, torch forbids the fork."""
    import gc
    import tempfile

    import torch
    from transformers import Trainer  # noqa: F401

    import tests.guarantees  # noqa: F401
    from tests.zoo import build

    torch.set_num_threads(1)
    model, _ = build("bert", "base")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        type(model).from_pretrained(folder)
    del model
    gc.collect()
    gc.freeze()


def _no_result(identifier: str, error: str) -> dict[str, Any]:
    return {"id": identifier, "built": True, "settings": {}, "error": error}


def passes(record: dict[str, Any], setting: str) -> bool | None:
    """Whether a model passes every check of a setting; None where there was nothing to check."""
    if "error" in record and setting not in record["settings"]:
        return False
    verdict = record["settings"].get(setting)
    return None if verdict is None else not verdict["failures"]


def report(records: list[dict[str, Any]], settings: list[str], wanted: int) -> str:
    """COVERAGE.md, from the records there are, of so many models wanted."""
    import timm
    import torch
    import transformers

    from tests.zoo import unbuilt

    lines = [
        "# Coverage",
        "",
        "Generated by `make sweep`; do not edit.",
        "",
        f"transformers {transformers.__version__}, timm {timm.__version__}, torch {torch.__version__}; tiny random "
        "models, CPU, fp32. Each model is patched and put through every check of `tests/guarantees.py`: bit-exact at "
        "strength 0 in eval and train, finite at strength 1, every patched module called, every new parameter with a "
        "gradient, weight decay as before, save and reload equal, unpatch exact.",
        "",
        f"Checked: {len(records)} of {wanted} models.",
        "",
        "| library | setting | models | with targets | modules patched | pass every check | share |",
        "|---|---|---|---|---|---|---|",
    ]
    failing: list[str] = []
    for library in ("transformers", "timm"):
        own = [r for r in records if r["id"].startswith(library + "/")]
        for setting in settings:
            verdicts = [(r, passes(r, setting)) for r in own if r["built"]]
            good = sum(v is True for _, v in verdicts)
            asked = sum(v is not None for _, v in verdicts)
            hit = [r["settings"][setting] for r, _ in verdicts if r["settings"].get(setting, {}).get("patched")]
            lines.append(
                f"| {library} | {setting} | {asked} | {len(hit)} | {sum(v['patched'] for v in hit):,} | {good} | "
                f"{100 * good / max(asked, 1):.1f} % |"
            )
            for record, verdict in verdicts:
                if verdict is False:
                    why = record["settings"].get(setting, {}).get("failures") or {"error": record.get("error", "")}
                    failing += [
                        f"| {record['id']} | {setting} | {check} | {_cell(text)} |" for check, text in why.items()
                    ]
    lines += ["", "## What fails", "", "| model | setting | check | what |", "|---|---|---|---|"]
    lines += failing or ["| none | | | |"]
    for setting in settings:
        reasons: Counter[str] = Counter()
        for record in records:
            for reason, count in record["settings"].get(setting, {}).get("left_alone", {}).items():
                reasons[reason] += count
        lines += ["", f"## Left alone, by reason: {setting}", "", "| modules | reason |", "|---|---|"]
        lines += [f"| {count:,} | {_cell(reason)} |" for reason, count in reasons.most_common()]
    notes = Counter(
        note.split(" (")[0] for r in records for v in r["settings"].values() for note in v.get("not_asked", [])
    )
    lines += ["", "## Not asked, since the unpatched model does not do it either", "", "| cases | what |", "|---|---|"]
    lines += [f"| {count} | {_cell(note)} |" for note, count in notes.most_common()]
    missing = unbuilt()
    lines += ["", f"## Not built: {len(missing)} model types or heads", "", "| model | reason |", "|---|---|"]
    lines += [f"| {name}/{head} | {_cell(reason)} |" for (name, head), reason in sorted(missing.items())]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "sweep.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model, all settings together")
    parser.add_argument("--settings", nargs="+", default=["norm", "norm+linear", "conv"])
    parser.add_argument("--heads", action="store_true", help="every task head, not one for each model type")
    parser.add_argument("--only", nargs="+", help="ids or parts of them")
    parser.add_argument("--report", action="store_true", help="check nothing, write COVERAGE.md from what there is")
    parser.add_argument("--every", type=int, default=1, help="only each n-th model")
    args = parser.parse_args()
    chosen = entries(args.heads)[:: args.every]
    if args.only:
        chosen = [i for i in entries(True) if any(part in i for part in args.only)]
    if args.report:
        done = {r["id"]: r for r in map(json.loads, args.results.read_text().splitlines())}
        records = [done[i] for i in chosen if i in done]
    else:
        records = sweep(chosen, args.settings, args.results, args.workers, args.limit)
    text = report(records, args.settings, len(chosen))
    if args.only or args.every > 1:
        print(text)
    else:
        COVERAGE.write_text(text)
        print("\n".join(text.splitlines()[:14]))


if __name__ == "__main__":
    main()
