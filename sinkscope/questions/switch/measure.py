"""`--measure switch`: is a sink a switch that turns its head off, and which tokens turn the head on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import LayerView, Missing
from sinkscope.capture.precision import as_widest
from sinkscope.engine.measurement import Findings, Measurement, Subject
from sinkscope.inputs.batches import Batch
from sinkscope.metrics.quantities import Quantity, table_by_head
from sinkscope.questions.switch.columns import OFF, by_position, openness
from sinkscope.questions.switch.tables import (
    COUNTS,
    OPENED,
    TokenTests,
    alignment_table,
    switch_table,
    token_table,
    token_tests,
    whole_tables,
)
from sinkscope.questions.switch.words import summarise
from sinkscope.runs.schema.stream import StreamSummary

TABLE = "switch"


@dataclass(frozen=True)
class Counted:
    """How often a view's heads are on at each token: the quantities COUNTS and OPENED of `runs.switch`."""

    counts: Tensor
    opened: Tensor


class Switch(Measurement):
    """Measures switch.csv, switch_tokens.csv, alignment.parquet and columns of layers.csv."""

    name = TABLE
    writing = True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        streams = {site.stream for site in subject.plan.sites}
        self._reading = {"text", "encoder"} if len(streams) > 1 else streams
        self._tests: dict[tuple[str, str], TokenTests] = {}
        self._whole: tuple[pd.DataFrame, pd.DataFrame] | None = None
        self._counted: tuple[LayerView, Counted | None] | None = None

    def quantities(self) -> tuple[Quantity, ...]:
        return (
            table_by_head(TABLE, self.subject.metrics),
            Quantity("alignment", ("sequence", "coordinate", "key"), by_position),
            Quantity(COUNTS, ("element", "coordinate"), lambda view: self._tokens(view).counts),
            Quantity(OPENED, ("element", "head", "coordinate"), lambda view: self._tokens(view).opened),
        )

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        self._ids, self._reached = ids, Counter[str]()
        self._places: dict[tuple[int, int], TokenPlaces] = {}
        try:
            yield
        finally:
            self._counted = None

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        domains, sites = findings.domains, findings.sites
        self._tests = token_tests(domains, sites)
        self._whole = whole_tables(domains, sites)
        return {
            TABLE: switch_table(domains, sites),
            "switch_tokens": token_table(domains, sites, findings.reading.tokenizer),
            "alignment": alignment_table(domains, sites),
        }

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        heads, layers = tables[TABLE], tables["layers"]
        names = set(heads["domain"]) if "domain" in heads else {name for name, _ in self._tests}
        if len(names) > 1 and self._whole is not None:
            heads, layers = self._whole
        tests = {
            stream: [test for (name, tested), test in self._tests.items() if tested == stream and name in names]
            for stream in self._reading
        }
        summarise(streams, heads, tables["switch_tokens"], layers, tests)

    def _tokens(self, view: LayerView) -> Counted:
        """Counts a view's tokens once for both quantities. Raises Missing where its queries are not the batch's."""
        if self._counted is None or self._counted[0] is not view:
            self._counted = (view, self._count(view))
        if self._counted[1] is None:
            raise Missing
        return self._counted[1]

    def _count(self, view: LayerView) -> Counted | None:
        places = self._places_of(view)
        try:
            rows = openness(view).transpose(1, 2)  # [sequence, row, head]
        except Missing:
            return None
        return None if places is None else places.count(torch.where(rows.isnan(), torch.nan, as_widest(rows >= OFF)))

    def _places_of(self, view: LayerView) -> TokenPlaces | None:
        """Where each token stands in the view's sequences, the same for all layers; None where they hold no tokens."""
        first = self._reached[view.site.name]
        self._reached[view.site.name] += view.batch
        rows = slice(first, first + view.batch)
        ids = self._ids[rows, : view.queries]
        lengths = (self._ids[rows] >= 0).sum(1)
        if view.site.stream not in self._reading or len(ids) < view.batch or (lengths != view.queries).any():
            return None
        key = (first, view.batch)
        if key not in self._places:
            self._places[key] = TokenPlaces.of(ids[:, 1:])
        return self._places[key]


@dataclass(frozen=True)
class TokenPlaces:
    """The tokens of some sequences, i >= 1.

    Attributes:
        counts: [token, 3]: id, occurrences, sequences that hold it; ids rise.
        pair: for each row of each sequence, the number of its pair of sequence and token.
        pairs: [pair, 3]: sequence, place of the token in `counts`, occurrences in the sequence.
    """

    counts: Tensor
    pair: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, ids: np.ndarray) -> TokenPlaces:
        """The places of the tokens in `ids`, [sequence, position]."""
        tokens, place = np.unique(ids, return_inverse=True)
        keys = np.arange(len(ids))[:, None] * len(tokens) + place.reshape(ids.shape)
        unique_keys, pair, number = np.unique(keys, return_inverse=True, return_counts=True)
        sequence, token = np.divmod(unique_keys, len(tokens))
        counts = np.stack(
            [tokens, np.bincount(token, number, len(tokens)), np.bincount(token, minlength=len(tokens))], 1
        )
        pairs = np.stack([sequence, token, number], 1)
        return cls(*(torch.from_numpy(array.astype(np.int64)) for array in (counts, pair.ravel(), pairs)))

    def count(self, on: Tensor) -> Counted:
        """Counts the rows in which each head is on; `on`: [sequence, row, head], 1, 0 or NaN.

        `opened` holds for each token and head: the rows that are on; the sum over sequences of d, the rows that are on
        beyond the head's share of such rows in that sequence; and the sum of d^2.
        """
        heads, device = on.shape[-1], on.device
        pair, (sequence, token, number) = self.pair.to(device), self.pairs.to(device).unbind(1)
        rows = on.new_zeros(len(sequence), heads).index_add_(0, pair, on.flatten(0, 1))
        excess = (rows * on.shape[1] - on.sum(1)[sequence] * number[:, None]) / on.shape[1]  # of integers: 0 is exact
        terms = torch.stack([rows, excess, excess.square()], -1)
        opened = on.new_zeros(len(self.counts), heads, 3).index_add_(0, token, terms)
        return Counted(self.counts.clone(), opened)  # a shard refuses tensors that share memory


MEASUREMENT = Switch
