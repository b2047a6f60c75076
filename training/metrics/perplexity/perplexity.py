"""Perplexity over classes: between how many equally likely classes the model still hesitates."""

import datasets
import evaluate
import numpy as np


class Perplexity(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="exp of the mean cross entropy: 1 at best, the number of classes for a uniform guess.",
            citation="",
            inputs_description="predictions: the cross entropy (nats) of each example, minus the log of the "
            "probability that the model gave to the right class.",
            features=datasets.Features(predictions=datasets.Value("float64")),
        )

    def _compute(self, predictions):
        return {"perplexity": float(np.exp(np.mean(np.asarray(predictions, np.float64))))}
