"""What `import hf_autonorm` costs beyond what a script that trains imports anyway, in fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

_SCRIPT = """
import json, time
start = time.perf_counter()
from transformers import AutoModel, Trainer
base = time.perf_counter()
cpu = time.process_time()
import hf_autonorm
print(json.dumps([base - start, time.perf_counter() - base, time.process_time() - cpu]))
"""


@dataclass(frozen=True)
class ImportTimes:
    """Seconds, one entry a process."""

    title: str
    transformers: list[float]
    ours: list[float]
    ours_cpu: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ours)


def run(seconds: float, processes: int = 5) -> dict[str, ImportTimes]:
    """`seconds` is not read. The first process may have to read the files from disk: mind the median."""
    rows = []
    for _ in range(processes):
        done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    columns = [list(column) for column in zip(*rows)]
    return {"import time": ImportTimes("import hf_autonorm after AutoModel and Trainer, fresh processes", *columns)}
