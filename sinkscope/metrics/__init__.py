"""Pure functions LayerView -> tensor, one family a file, one function a column.

Conventions of them all: computed per sequence first, in float32, over valid tokens only (a LayerView holds no
padding), averaged over sequences afterwards. Missing is NaN, never 0. `i` counts queries, `j` and `k` keys, from 0.
"""

from sinkscope.metrics import geometry, mass, positions, residual, smoothing, values
from sinkscope.metrics.registry import METRICS, Metric, MetricSet, register, registered

for _family in (geometry, mass, residual, smoothing, values):  # the order of the columns
    register(_family)

__all__ = [
    "METRICS",
    "Metric",
    "MetricSet",
    "geometry",
    "mass",
    "positions",
    "registered",
    "residual",
    "smoothing",
    "values",
]
