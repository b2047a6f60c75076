"""`evaluate` modules kept here, so that no run needs the network for its metrics."""

from pathlib import Path

import evaluate


def load_metric(name: str) -> evaluate.EvaluationModule:
    """The module in the folder `name`. In memory, since each rank of a distributed run has all and computes alone."""
    return evaluate.load(str(Path(__file__).parent / name), keep_in_memory=True)
