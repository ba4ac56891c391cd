"""The metrics: pure functions LayerView -> tensor. Each file holds one family, each function computes one column.

All follow the same conventions. A metric is computed for each sequence first, in float32, over valid tokens only (a
LayerView holds no padding); the mean over sequences is taken afterwards. A missing value is NaN, never 0. `i` counts
queries, `j` and `k` count keys, both from 0. The columns of a question stand in the question's folder.
"""

from sinkscope.metrics import events, geometry, mass, positions, residual, values
from sinkscope.metrics.registry import METRICS, Metric, MetricSet, register, registered

FAMILIES = (geometry, mass, residual, values, events)  # in the columns' order
for _family in FAMILIES:
    register(_family)

__all__ = [
    "METRICS",
    "Metric",
    "MetricSet",
    "events",
    "geometry",
    "mass",
    "positions",
    "registered",
    "residual",
    "values",
]
