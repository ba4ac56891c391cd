"""Means and standard errors over sequences when some values are missing."""

from __future__ import annotations

import numpy as np


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis, leaving out NaN; NaN where all values are missing."""
    count = (~np.isnan(values)).sum(0)
    total = np.nansum(values, axis=0)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def sem(values: np.ndarray) -> np.ndarray:
    """Standard error of `mean`: sample standard deviation (n - 1) over sqrt(n), leaving out NaN.

    NaN for fewer than two values, and where a value is infinite (a ratio over 0).
    """
    count = (~np.isnan(values)).sum(0)
    with np.errstate(invalid="ignore"):
        deviations = values - mean(values)
    squares = np.where(np.isinf(values).any(0), np.nan, np.nansum(deviations**2, axis=0))
    spread = np.divide(squares, count * (count - 1.0), out=np.full(np.shape(squares), np.nan), where=count > 1)
    return np.sqrt(spread)


def pairwise_cosine(units: np.ndarray) -> float:
    """Mean cosine over unordered pairs of rows, [rows, channel]; NaN for fewer than two rows.

    Rows that are unit vectors in float32 are so within its rounding alone: equal ones would have a cosine above 1.
    """
    count = len(units)
    if count < 2:
        return float("nan")
    units = units.astype(np.float64)
    norms = np.linalg.norm(units, axis=1, keepdims=True)
    units = units / np.where(norms > 0, norms, 1.0)
    total = units.sum(0)
    return float((total @ total - (units * units).sum()) / (count * (count - 1)))
