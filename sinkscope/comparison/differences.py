"""Statistics of two samples of sequences: differences, standard errors, p-values, false discovery rates, bootstrap.

All functions take whole arrays whose first axis is the sequences; NaN is a missing value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkscope.runs.averages import mean, sem

RESAMPLES = 2000
CHUNK = 256
"""Number of cells bootstrapped at once: 2000 resamples of 100 sequences stay under half a gigabyte."""


@dataclass(frozen=True)
class Difference:
    """b - a for every cell (one metric of a head, a layer or a stream).

    Attributes:
        a, b: means over sequences.
        difference: the difference of the means.
        sem: its standard error.
        p: p-value of the two-sided t-test of no difference; exactly 1 where the samples are equal, exactly 0 where they
            differ by a constant.
    """

    a: np.ndarray
    b: np.ndarray
    difference: np.ndarray
    sem: np.ndarray
    p: np.ndarray


def paired_difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Paired t-test of b - a along the first axis, [N, ...]; leaves out sequences where either value is missing."""
    gaps = b - a
    present = ~np.isnan(gaps)
    error = sem(gaps)
    a, b = np.where(present, a, np.nan), np.where(present, b, np.nan)
    return _tested(mean(a), mean(b), mean(gaps), error, present.sum(0) - 1.0)


def welch_difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Welch's t-test of two separate samples, [N, ...] and [M, ...]."""
    return from_moments(mean(a), sem(a), (~np.isnan(a)).sum(0), mean(b), sem(b), (~np.isnan(b)).sum(0))


def from_moments(
    a: np.ndarray, a_sem: np.ndarray, a_count: np.ndarray, b: np.ndarray, b_sem: np.ndarray, b_count: np.ndarray
) -> Difference:
    """Welch's t-test from means, standard errors and counts, with Satterthwaite's degrees of freedom."""
    va, vb = np.asarray(a_sem, float) ** 2, np.asarray(b_sem, float) ** 2
    freedom = _freedom(va, a_count, vb, b_count)
    return _tested(np.asarray(a, float), np.asarray(b, float), b - a, np.sqrt(va + vb), freedom)


def _freedom(va: np.ndarray, a_count: np.ndarray, vb: np.ndarray, b_count: np.ndarray) -> np.ndarray:
    """Satterthwaite's degrees of freedom of a difference of means whose squared standard errors are va and vb."""
    with np.errstate(all="ignore"):
        return (va + vb) ** 2 / (va**2 / (np.asarray(a_count) - 1.0) + vb**2 / (np.asarray(b_count) - 1.0))


def beyond(
    change: np.ndarray, allowed: np.ndarray, a_sem: np.ndarray, a_count: np.ndarray, b_sem: np.ndarray,
    b_count: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """p-value of the hypothesis "|true difference| <= `allowed`" (Welch's test); `change` = |difference of the means|.

    It is computed for the hypothesis's worst case, a true difference of `allowed`. Both tails count, so that `allowed`
    0 gives the two-sided test. It is 0 or 1 where neither sample varies, NaN where a standard error or the change is
    missing.
    """
    from scipy.stats import t

    va, vb = a_sem**2, b_sem**2
    error, freedom = np.sqrt(va + vb), _freedom(va, a_count, vb, b_count)
    with np.errstate(all="ignore"):
        p = t.sf((change - allowed) / error, freedom) + t.sf((change + allowed) / error, freedom)
    p = np.where(error == 0, np.where(change > allowed, 0.0, 1.0), np.minimum(p, 1.0))
    return np.where(np.isnan(change) | np.isnan(error), np.nan, p)


def _tested(a: np.ndarray, b: np.ndarray, difference: np.ndarray, error: np.ndarray, freedom: np.ndarray) -> Difference:
    from scipy.stats import t

    with np.errstate(all="ignore"):
        p = np.asarray(2 * t.sf(np.abs(difference / error), freedom), float)
    p = np.where(error == 0, np.where(difference == 0, 1.0, 0.0), p)
    return Difference(a, b, difference, error, np.where(np.isnan(difference) | np.isnan(error), np.nan, p))


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg q-values of the p-values; NaN stays NaN and is not counted."""
    from scipy.stats import false_discovery_control

    q = np.full(p.shape, np.nan)
    present = ~np.isnan(p)
    if present.any():
        q[present] = false_discovery_control(p[present])
    return q


def bootstrap_interval(
    a: np.ndarray, b: np.ndarray, paired: bool, confidence: float = 0.95, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval (scipy, BCa, 2000 resamples of sequences) of mean(b) - mean(a); a, b: [N, cells].

    Paired samples are resampled together. Each cell uses the sequences that have a value (in both samples, if paired);
    with fewer than two of them its interval is NaN. Where all resamples are equal the interval is that point.
    """
    low, high = np.full(a.shape[1], np.nan), np.full(a.shape[1], np.nan)
    a_present, b_present = ~np.isnan(a), ~np.isnan(b)
    if paired:
        a_present = b_present = a_present & b_present
    patterns, which = np.unique(np.concatenate([a_present, b_present]), axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        cells = np.flatnonzero(which == number)
        x, y = a[pattern[: len(a)]][:, cells], b[pattern[len(a) :]][:, cells]
        if len(x) > 1 and len(y) > 1:
            low[cells], high[cells] = _intervals(x, y, paired, confidence, seed)
    return low, high


def _intervals(
    a: np.ndarray, b: np.ndarray, paired: bool, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap intervals for cells that share one set of sequences."""
    constant = (np.ptp(b - a, axis=0) == 0) if paired else (np.ptp(a, axis=0) == 0) & (np.ptp(b, axis=0) == 0)
    low = b.mean(0) - a.mean(0)
    high = low.copy()
    varying = np.flatnonzero(~constant)
    for start in range(0, len(varying), CHUNK):
        part = varying[start : start + CHUNK]
        low[part], high[part] = _resampled(a[:, part], b[:, part], paired, confidence, seed)
    return low, high


def _resampled(
    a: np.ndarray, b: np.ndarray, paired: bool, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.stats import bootstrap

    def gap(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
        return second.mean(axis) - first.mean(axis)

    def average(values: np.ndarray, axis: int) -> np.ndarray:
        return values.mean(axis)

    common = {
        "confidence_level": confidence, "n_resamples": RESAMPLES, "batch": 200, "axis": 0, "vectorized": True,
        "rng": np.random.default_rng(seed),
    }  # fmt: skip
    result = bootstrap((b - a,), average, **common) if paired else bootstrap((a, b), gap, **common)
    return result.confidence_interval.low, result.confidence_interval.high
