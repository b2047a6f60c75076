"""Files of runs, one JSON line a run: what is there is not made again."""

import json
import os
from pathlib import Path


def read_records(path: Path) -> list[dict]:
    """The complete lines; a last one that was broken off is left out."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def drop_torn_line(path: Path) -> None:
    """Takes off what a run that was killed while it wrote has left; before anything is appended."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text and not text.endswith("\n"):
        write_whole(path, text[: text.rfind("\n") + 1])


def write_whole(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    half_written = path.with_name(f"{path.name}.tmp")
    half_written.write_text(text, encoding="utf-8")
    os.replace(half_written, path)
