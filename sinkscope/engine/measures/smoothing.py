"""`--measure smoothing`: does each head make tokens more similar? Measured on each LayerView in float64."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import LayerView, Missing
from sinkscope.capture.precision import float64
from sinkscope.capture.wiring.folded import FoldedHeads, OutputWeights
from sinkscope.capture.wiring.folding import fold
from sinkscope.capture.wiring.trace import output_slices
from sinkscope.engine.measures.measurement import Findings, Measurement, Subject
from sinkscope.metrics.quantities import Quantity
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.smoothing import NOTHING, add_verdicts, smoothing_table

TABLE = "smoothing"

KEPT_BYTES = 256 * 2**20
"""The most memory for what is kept of each layer's output projection from one batch to the next."""


class Smoothing(Measurement):
    """Measures the columns of smoothing.csv."""

    name = "smoothing"
    wired = True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._roots: dict[str, Tensor] = {}

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity(TABLE, ("sequence", "head", "metric"), self._of_view),)

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {TABLE: smoothing_table(findings.domains, findings.sites, self.wirings)}

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_verdicts(streams, tables[TABLE])

    def _of_view(self, view: LayerView) -> Tensor:
        """[sequence, head, metric], float64; NaN where the layer lacks what it needs."""
        slices = output_slices(self.subject.model, view.site)
        home = float64(view.attention.first[:0]).device
        weights = None if slices is None else OutputWeights(slices.to(home))
        if weights is not None and view.site.name in self._roots:
            weights.roots = self._roots[view.site.name]
        wiring = self.wirings.get(view.site.name, NOTHING)
        rows = torch.stack([self._columns(fold(view, wiring, weights, number)) for number in range(view.batch)])
        if weights is not None and "roots" in vars(weights) and self._room(weights.roots):
            self._roots[view.site.name] = weights.roots
        return rows

    def _room(self, roots: Tensor) -> bool:
        return sum(each.nbytes for each in self._roots.values()) + roots.nbytes <= KEPT_BYTES

    def _columns(self, folded: FoldedHeads) -> Tensor:
        columns = []
        for metric in self.subject.metrics.tables[TABLE].values():
            try:
                columns.append(metric.compute(folded).cpu().double())
            except Missing:
                columns.append(torch.full((folded.heads,), torch.nan, dtype=torch.float64))
        return torch.stack(columns, -1)


MEASUREMENT = Smoothing
