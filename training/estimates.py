"""A mean over seeds, and how sure one can be of it."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import stats


class Estimate(NamedTuple):
    """A mean over seeds with its 95 % interval (Student's t) and two-sided p-value against 0; NaN without a spread."""

    mean: float
    low: float
    high: float
    p: float


def estimate(values: Iterable[float]) -> Estimate:
    values = np.asarray(list(values), dtype=float)
    mean = float(values.mean()) if len(values) else np.nan
    if len(values) < 2 or np.ptp(values) < 1e-12:  # without any spread there is nothing to estimate it from
        return Estimate(mean, np.nan, np.nan, np.nan)
    test = stats.ttest_1samp(values, 0)
    interval = test.confidence_interval(0.95)
    return Estimate(mean, float(interval.low), float(interval.high), float(test.pvalue))
