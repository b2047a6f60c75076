"""MAE: the mean absolute difference between predictions and references."""

import datasets
import evaluate
import numpy as np


class MAE(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The mean absolute difference between predictions and references.",
            citation="",
            inputs_description="predictions, references: numbers, one each per example, in the same units.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("float64")),
        )

    def _compute(self, predictions, references):
        difference = np.asarray(predictions, np.float64) - np.asarray(references, np.float64)
        return {"mae": float(np.mean(np.abs(difference)))}
