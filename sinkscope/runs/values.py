"""What a run holds of one attention call over all sequences of a domain: the arrays that every table is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sinkscope.metrics.quantities import QuantitySet


@dataclass
class SiteValues:
    """One attention site over all sequences of one domain.

    Attributes:
        quantities: what was measured; its metrics name the columns of `heads`, `layers` and `smoothing`.
        arrays: every quantity by its name, with its axes, float64; NaN where a value is missing, left out where all
            are. A quantity by position has no sequence axis: it is the mean over the sequences.
        lengths: prefixes of the length curve.
        count: sequences, N below.
        causal, queries, keys: as the attention call was; the most queries and keys of any sequence.
    """

    quantities: QuantitySet
    arrays: dict[str, np.ndarray]
    lengths: list[int]
    count: int
    causal: bool
    queries: int
    keys: int

    @property
    def heads(self) -> np.ndarray:
        """[N, H, metric]: every head metric."""
        return self.arrays["heads"]

    @property
    def layers(self) -> np.ndarray:
        """[N, metric]: every layer metric."""
        return self.arrays["layers"]

    @property
    def alpha(self) -> np.ndarray:
        """[H, K]: mean over sequences of alpha_k."""
        return self.arrays["alpha"]

    @property
    def first_unit(self) -> np.ndarray | None:
        """[N, D]: x_0 / norm x_0; None where the block's input was not seen."""
        return self.arrays.get("first_unit")

    @property
    def massive(self) -> Counter[tuple[int, int]]:
        """(position, channel) -> number of sequences in which that element of x is massive."""
        found = self.arrays.get("massive")
        return Counter() if found is None else Counter((int(place), int(channel)) for place, channel in found)

    @property
    def smoothing(self) -> np.ndarray | None:
        """[N, H, metric] of the smoothing table; None where it was not asked for."""
        return self.arrays.get("smoothing")

    def head(self, name: str) -> np.ndarray:
        """[N, H] values of one head metric."""
        return self.heads[:, :, self.quantities.metrics.names("heads").index(name)]

    def layer(self, name: str) -> np.ndarray:
        """[N] values of one layer metric."""
        return self.layers[:, self.quantities.metrics.names("layers").index(name)]


@dataclass
class Domain:
    """The sequences of one --data SPEC, and what was measured on them, by site name."""

    name: str
    ids: np.ndarray
    documents: list[str]
    sites: dict[str, SiteValues] = field(default_factory=dict)
