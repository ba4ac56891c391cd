"""What a run holds of one attention call over all sequences of a domain: the arrays that every table is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sinkscope.metrics.registry import MetricSet, registered

CURVE_NAMES = ("bos_mass", "sink_score")


@dataclass
class SiteValues:
    """One attention site over all sequences of one domain (N of them). NaN where a metric could not be had.

    Attributes:
        heads: [N, H, metric], in the order of `metrics`.
        layers: [N, metric], in the order of `metrics`.
        curve: [N, H, prefix, (bos_mass, sink_score)] at `prefixes`.
        alpha, early: mean over sequences of alpha_k, [H, K] and [H, 64] (None where T < 64).
        first_unit: x_0 / norm x_0 of each sequence, [N, D]; None where the block's input was not seen.
        massive: (position, channel) -> number of sequences in which that element of x is massive.
        causal, queries, keys: as the attention call was.
        first, first_share: mean over sequences of A[i,0], and of |A[i,0]| / sum_j |A[i,j]|, by query i, [H, T].
        smoothing: [N, H, metric] of the smoothing table; None where it was not asked for.
    """

    heads: np.ndarray
    layers: np.ndarray
    curve: np.ndarray
    prefixes: list[int]
    alpha: np.ndarray
    early: np.ndarray | None
    first_unit: np.ndarray | None
    causal: bool
    queries: int
    keys: int
    first: np.ndarray
    first_share: np.ndarray
    massive: Counter[tuple[int, int]] = field(default_factory=Counter)
    smoothing: np.ndarray | None = None
    metrics: MetricSet = field(default_factory=registered)

    def head(self, name: str) -> np.ndarray:
        """[N, H] values of one head metric."""
        return self.heads[:, :, self.metrics.names("heads").index(name)]

    def layer(self, name: str) -> np.ndarray:
        """[N] values of one layer metric."""
        return self.layers[:, self.metrics.names("layers").index(name)]


@dataclass
class Domain:
    """The sequences of one --data SPEC, and what was measured on them, by site name."""

    name: str
    ids: np.ndarray
    documents: list[str]
    sites: dict[str, SiteValues] = field(default_factory=dict)
