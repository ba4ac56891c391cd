"""Student's t and the false discovery rate. scipy.stats has both and takes longer to import than pandas; the functions
of scipy.special below are those that it calls."""

from __future__ import annotations

from typing import Any

import numpy as np


def t_above(value: Any, freedom: Any) -> np.ndarray:
    """Probability that Student's t with `freedom` degrees is above `value`; NaN where either is missing."""
    from scipy.special import stdtr

    return np.asarray(stdtr(freedom, -np.asarray(value, float)), float)


def t_half_width(confidence: float, freedom: Any) -> np.ndarray:
    """Half the width of the interval that holds Student's t with probability `confidence`, in standard errors."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(freedom, 0.5 + confidence / 2), float)


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg q-values of p-values of any shape: the least over p_j >= p_i of p_j n / rank_j, at most 1.

    NaN stays NaN and is not counted. Source: Benjamini and Hochberg 1995.
    """
    q = np.full(p.shape, np.nan)
    present = ~np.isnan(p)
    known = p[present]
    falling = np.argsort(-known, kind="stable")
    count = len(known)
    found = np.empty(count)
    found[falling] = np.minimum.accumulate(known[falling] * (count / np.arange(count, 0, -1)))
    q[present] = np.minimum(found, 1.0)
    return q
