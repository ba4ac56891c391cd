"""`--measure regions`: how heads attend from the words of each speaker of a conversation. Asked for by chats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import AttentionCall, LayerView, Missing
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.per_query import group_masses
from sinkscope.capture.precision import as_float64
from sinkscope.engine.measurement import Findings, Measurement, Subject
from sinkscope.inputs.batches import Batch
from sinkscope.inputs.chats import REGIONS
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.regions.tables import add_regions, region_table
from sinkscope.runs.schema.stream import StreamSummary


class RegionMeasure(Measurement):
    """Measures the columns of regions.csv for the queries of each region by themselves."""

    name = "regions"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._regions: Tensor | None = None
        self._padded = False
        self._reached: dict[str, int] = {}
        self._calls = 0

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity("regions", ("sequence", "head", "element"), self._of_view),)

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        self._regions = None if batch.regions is None else torch.from_numpy(batch.regions)
        self._padded, self._reached, self._calls = batch.spans is not None, {}, 0
        yield

    def of_call(self, call: AttentionCall | AttentionMap) -> Tensor | None:
        """[sequence, head, query]: the mass on the template's markers."""
        if self._regions is None:
            return None
        row, self._calls = self._calls, self._calls + 1  # a padded batch is read sequence by sequence
        batch, _, keys = _sizes(call)
        rows = self._rows(row, batch)
        if (rows[:, keys:] >= 0).any():
            return None  # these keys are not the sequence's own tokens
        markers = torch.where(rows[:, :keys] == 0, 0, -1)
        return group_masses(call, markers, 1)[..., 0]

    def _rows(self, row: int, batch: int) -> Tensor:
        """The regions of the sequences that a call holds: all of the batch, or the next one of a padded batch."""
        assert self._regions is not None
        if not self._padded:
            return self._regions
        row %= len(self._regions)
        return self._regions[row : row + batch]

    def _of_view(self, view: LayerView) -> Tensor:
        """[sequence, head, region x column]: see `COLUMNS` of `tables.py`; NaN for a region without queries."""
        markers = view.readings.get(self.name)
        attention, diagonal = view.attention, view.attention.diagonal
        if self._regions is None or markers is None or diagonal is None or not attention.causal:
            raise Missing
        if view.site.stream == "decoder":  # it reads the text one place later, so these queries are other tokens
            raise Missing
        row = self._reached.get(view.site.name, 0)
        self._reached[view.site.name] = row + view.batch
        rows = self._regions[row : row + view.batch, : view.queries].to(markers.device)
        values = as_float64(torch.stack([attention.first, diagonal, markers, attention.entropy], -1))
        values = values[:, :, 1:]  # query 0 sees itself alone
        member = torch.nn.functional.one_hot(rows[:, 1:].clamp(min=0), len(REGIONS)).to(values)
        member = member * (rows[:, 1:, None] >= 0)
        counts = member.sum(1)[:, None, :, None]
        means = torch.einsum("bhtc,btr->bhrc", values, member) / counts
        shares = counts.expand(-1, view.heads, -1, -1)
        whole = torch.cat([shares, torch.where(shares > 0, means, torch.nan)], -1)
        return whole.flatten(2)

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {"regions": region_table(findings.domains, findings.sites)}

    def left_out(self, tables: dict[str, pd.DataFrame]) -> list[str]:
        if len(tables[self.name]):
            return []
        return [
            f"--measure {self.name}: no sequence is a conversation whose speakers are known, so it measured nothing"
        ]

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_regions(streams, tables["regions"])


def _sizes(call: AttentionCall | AttentionMap) -> tuple[int, int, int]:
    """Sequences, queries and keys of a call."""
    if isinstance(call, AttentionCall):
        return call.query.shape[0], *call.lengths
    batch, _, queries, keys = call.probabilities.shape
    return batch, queries, keys


MEASUREMENT = RegionMeasure
