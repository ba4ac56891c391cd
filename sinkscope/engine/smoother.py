"""Measures the smoothing columns of each LayerView, where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import LayerView, Missing, Plan
from sinkscope.capture.precision import float64
from sinkscope.capture.wiring.folded import FoldedHeads, OutputWeights, fold
from sinkscope.capture.wiring.trace import Wiring, output_slices, trace
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.metrics.registry import Metric
from sinkscope.runs.smoothing import NOTHING


@dataclass(frozen=True)
class Smoother:
    """Measures the smoothing columns of a model's views. `metrics`: the columns, by name."""

    model: nn.Module
    wirings: dict[str, Wiring]
    metrics: Mapping[str, Metric]

    def __call__(self, view: LayerView) -> Tensor:
        """[sequence, head, metric] in the order of `metrics`, float64; NaN where the layer lacks what it needs."""
        slices = output_slices(self.model, view.site)
        home = float64(view.attention.first[:0]).device
        weights = None if slices is None else OutputWeights(slices.to(home))
        wiring = self.wirings.get(view.site.name, NOTHING)
        return torch.stack([self._columns(fold(view, wiring, weights, number)) for number in range(view.batch)])

    def _columns(self, folded: FoldedHeads) -> Tensor:
        columns = []
        for metric in self.metrics.values():
            try:
                columns.append(metric.compute(folded).cpu().double())
            except Missing:
                columns.append(torch.full((folded.heads,), torch.nan, dtype=torch.float64))
        return torch.stack(columns, -1)


def smoother(model: nn.Module, plan: Plan, forward: Callable[[], Any], declared: QuantitySet) -> Smoother:
    """Finds every layer's linear maps in one call of `forward`: see `capture.wiring.trace`."""
    return Smoother(model, trace(model, plan, forward), declared.metrics.tables["smoothing"])
