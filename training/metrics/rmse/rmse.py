"""RMSE: the root of the mean squared difference between predictions and references."""

import datasets
import evaluate
import numpy as np


class RMSE(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The root of the mean squared difference between predictions and references.",
            citation="",
            inputs_description="predictions, references: numbers, one each per example, in the same units.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("float64")),
        )

    def _compute(self, predictions, references):
        difference = np.asarray(predictions, np.float64) - np.asarray(references, np.float64)
        return {"rmse": float(np.sqrt(np.mean(difference**2)))}
