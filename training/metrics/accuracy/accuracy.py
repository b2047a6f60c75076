"""Accuracy: the share of predictions that equal their reference."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions, references: class indices, one each per example.",
            features=datasets.Features(predictions=datasets.Value("int32"), references=datasets.Value("int32")),
        )

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
