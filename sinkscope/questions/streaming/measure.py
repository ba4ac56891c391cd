"""`--measure streaming`: what would a KV cache of the first and the recent tokens forget?"""

from __future__ import annotations

import pandas as pd

from sinkscope.capture import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.per_query import Regions, RegionSums, region_sums
from sinkscope.engine.measurement import Measurement
from sinkscope.questions.streaming.columns import TABLE
from sinkscope.questions.streaming.words import add_streaming
from sinkscope.runs.schema.stream import StreamSummary


class Streaming(Measurement):
    """Measures the columns of streaming.csv, and lazy_score of layers.csv."""

    name = TABLE

    def of_call(self, call: AttentionCall | AttentionMap) -> RegionSums | None:
        request = self.subject.request
        if isinstance(call, AttentionCall):
            queries, keys = call.lengths
            cached = call.visible.causal
        else:
            queries, keys = call.probabilities.shape[-2:]
            cached = True  # the sums of the map will tell
        if not cached or queries != keys or keys <= request.options["sinks"] + request.options["window"]:
            return None
        return region_sums(call, Regions(request.options["sinks"], request.options["window"]))

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_streaming(streams, tables[TABLE], self.subject.request)


MEASUREMENT = Streaming
