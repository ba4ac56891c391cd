"""`--measure streaming`: what would a KV cache of the first and the recent tokens forget?"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import AttentionCall, LayerView, Missing
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.regions import Regions, RegionSums, region_sums
from sinkscope.engine.measures.measurement import Findings, Measurement
from sinkscope.metrics.quantities import Quantity
from sinkscope.metrics.streaming import TABLE
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.streaming import add_streaming, streaming_table


class Streaming(Measurement):
    """Measures the columns of streaming.csv, and lazy_score of layers.csv."""

    name = TABLE

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity(TABLE, ("sequence", "head", "metric"), self._of_view),)

    def of_call(self, call: AttentionCall | AttentionMap) -> RegionSums | None:
        asked = self.subject.asked
        if isinstance(call, AttentionCall):
            queries, keys = call.lengths
            cached = call.visible.causal
        else:
            queries, keys = call.probabilities.shape[-2:]
            cached = True  # the sums of the map will tell
        if not cached or queries != keys or keys <= asked.sinks + asked.window:
            return None
        return region_sums(call, Regions(asked.sinks, asked.window))

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {TABLE: streaming_table(findings.domains, findings.sites)}

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_streaming(streams, tables[TABLE], self.subject.asked)

    def _of_view(self, view: LayerView) -> Tensor:
        """[sequence, head, metric]; NaN where the layer lacks what it needs."""
        like = view.attention.first[..., 0]
        columns = []
        for metric in self.subject.metrics.tables[TABLE].values():
            try:
                columns.append(metric.compute(view))
            except Missing:
                columns.append(torch.full_like(like, torch.nan))
        return torch.stack(columns, -1)


MEASUREMENT = Streaming
