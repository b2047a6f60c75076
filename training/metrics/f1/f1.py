"""F1: the harmonic mean of precision and recall, averaged over classes as asked."""

import datasets
import evaluate
from sklearn.metrics import f1_score


class F1(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The harmonic mean of precision and recall.",
            citation="",
            inputs_description="predictions, references: class indices, one each per example; average: 'macro' (each "
            "class that occurs in either counts alike), 'micro', 'weighted' or 'binary' (the class `pos_label`).",
            features=datasets.Features(predictions=datasets.Value("int32"), references=datasets.Value("int32")),
        )

    def _compute(self, predictions, references, average="macro", labels=None, pos_label=1):
        score = f1_score(
            references, predictions, average=average, labels=labels, pos_label=pos_label, zero_division=0.0
        )
        return {"f1": float(score)}
