"""Which checkpoint a run goes on from: a process can be killed while it writes one."""

import json
import re
import warnings
import zipfile
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from hf_autonorm.hub.facts import call
from hf_autonorm.patching.record import patch_entries
from training import ema


def find_checkpoint(wanted: str | None, output_dir: str, processes: int, with_ema: bool) -> str | None:
    """What `--resume_from_checkpoint` means: a folder as it is; `last`: the newest whole checkpoint in `output_dir`,
    None (with a warning) where there is none yet."""
    if wanted != "last":
        return wanted
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        if is_whole(path, processes, with_ema):
            return str(path)
        warnings.warn(f"{path} was not written to its end; an older checkpoint is looked for.")
    warnings.warn(f"{output_dir} has no checkpoint; the run starts from the beginning.")
    return None


def is_whole(folder: Path, processes: int, with_ema: bool) -> bool:
    """Trainer writes the weights, the optimizer, the random state of each process and, last, its own state."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    random_states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    whole = all(zipfile.is_zipfile(folder / name) for name in random_states)
    return whole and (not with_ema or (folder / ema.FILE).is_file())


def require_same_patch(checkpoint: str | None, model) -> None:
    """Raises ValueError where the run that wrote `checkpoint` was of another variant or seed: Trainer would go on with
    what fits, which between two kinds of gate is everything."""
    config = Path(checkpoint or "", "config.json")
    if checkpoint is None or not config.is_file():  # Trainer names a folder that is no checkpoint
        return
    record = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    there = [entry["spec"] for entry in record.get("patches", [])]
    here = [entry["spec"] for entry in patch_entries(model)]
    if there != here:
        calls = ["; ".join(map(call, specs)) or "no patch" for specs in (there, here)]
        raise ValueError(
            f"{checkpoint} is of another run: {calls[0]}, here {calls[1]}. Give the variant, seed and settings that "
            "it was written with, or another output_dir."
        )
