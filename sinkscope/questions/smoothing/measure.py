"""`--measure smoothing`: does each head make tokens more similar? Measured sequence by sequence on each LayerView."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import AttentionCall, LayerView, Missing
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.per_query import pair_margins
from sinkscope.capture.precision import as_float64
from sinkscope.engine.measurement import Findings, Measurement
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.smoothing.tables import NOTHING, add_verdicts, smoothing_table
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.folding import fold
from sinkscope.wiring.mixes import OutputWeights
from sinkscope.wiring.trace import output_slices

TABLE = "smoothing"


class Smoothing(Measurement):
    """Measures the columns of smoothing.csv."""

    name = "smoothing"
    wired = True
    writing = True

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity(TABLE, ("sequence", "head", "metric"), self._of_view),)

    def of_call(self, call: AttentionCall | AttentionMap) -> Tensor | None:
        return pair_margins(call)

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {TABLE: smoothing_table(findings.domains, findings.sites, self.wirings)}

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_verdicts(streams, tables[TABLE])

    def _of_view(self, view: LayerView) -> Tensor:
        """[sequence, head, metric], float64; NaN where the layer lacks what it needs."""
        slices = output_slices(self.subject.model, view.site)
        weights = None if slices is None else OutputWeights(slices.to(view.attention.first.device), view.factors)
        wiring = self.wirings.get(view.site.name, NOTHING)
        pairs, columns = view.readings.get(self.name), []
        for number, folded in enumerate(fold(view, wiring, weights)):
            folded.pair_margin = None if pairs is None else as_float64(pairs[number, :, 1:])
            columns.append(self._columns(folded, number < view.sampled))
        return torch.stack(columns)

    def _columns(self, folded: FoldedHeads, sampled: bool) -> Tensor:
        """[head, metric]; metrics too slow for every sequence stay NaN where this one is not `sampled`."""
        missing = torch.full((folded.heads,), torch.nan, dtype=torch.float64)
        columns = []
        for metric in self.subject.metrics.tables[TABLE].values():
            try:
                measured = sampled or not metric.sampled
                columns.append(metric.compute(folded).cpu().double() if measured else missing)
            except Missing:
                columns.append(missing)
        return torch.stack(columns, -1)


MEASUREMENT = Smoothing
