"""`evaluate` modules kept here, so that no run needs the network for its metrics."""

from collections.abc import Callable
from pathlib import Path

import evaluate


def load_metric(name: str) -> evaluate.EvaluationModule:
    """The module in the folder `name`. In memory, since each rank of a distributed run has all and computes alone."""
    return evaluate.load(str(Path(__file__).parent / name), keep_in_memory=True)


def classification_scorer() -> Callable:
    """Accuracy and macro-F1 of predicted class indices, one an example."""
    accuracy, f1 = load_metric("accuracy"), load_metric("f1")

    def compute_metrics(output) -> dict[str, float]:
        pairs = {"predictions": output.predictions, "references": output.label_ids}
        return {**accuracy.compute(**pairs), "f1_macro": f1.compute(**pairs, average="macro")["f1"]}

    return compute_metrics
