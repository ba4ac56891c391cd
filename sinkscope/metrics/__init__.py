"""The metrics: pure functions LayerView -> tensor. Each file holds one family, each function computes one column.

All follow the same conventions. A metric is computed for each sequence first, in float32, over valid tokens only (a
LayerView holds no padding); the mean over sequences is taken afterwards. A missing value is NaN, never 0. `i` counts
queries, `j` and `k` count keys, both from 0.
"""

from sinkscope.metrics import (
    alignment,
    events,
    geometry,
    mass,
    positions,
    residual,
    smoothing,
    streaming,
    switch,
    uniform,
    values,
)
from sinkscope.metrics.registry import METRICS, Metric, MetricSet, register, registered

FAMILIES = (geometry, mass, residual, smoothing, streaming, values, events, switch, alignment)  # in the columns' order
for _family in FAMILIES:
    register(_family)

__all__ = [
    "METRICS",
    "Metric",
    "MetricSet",
    "alignment",
    "events",
    "geometry",
    "mass",
    "positions",
    "registered",
    "residual",
    "smoothing",
    "streaming",
    "switch",
    "uniform",
    "values",
]
