"""The record of a domain whose longest sequence is not known before the last has come."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.engine.collector import Part, Parts, prefixes
from sinkscope.engine.record import BatchRecord
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.tables.values import SiteValues


class GrowingRecord:
    """Batches of sequences of any length, in the order in which they come. `quantities`: what was measured."""

    def __init__(self, quantities: QuantitySet) -> None:
        self._quantities = quantities
        self._record = BatchRecord(1, quantities)
        self._lengths: list[list[int]] = []
        self.longest = 0

    @property
    def count(self) -> int:
        """Sequences so far."""
        return self._record.count

    def keep(self, length: int, count: int, parts: Parts) -> None:
        """Keeps a batch of `count` sequences, whose longest has `length` tokens."""
        self._lengths += [prefixes(length, self._quantities.lengths)] * count
        self.longest = max(self.longest, length)
        self._record.keep(self._record.count, count, parts)

    def values(self) -> dict[str, SiteValues]:
        """The values of all sequences so far, by site name; more may come afterwards."""
        copied = deepcopy(self._record)
        by_length = [each.name for each in self._quantities.quantities if each.dims[-1] == "length"]
        wanted = prefixes(self.longest, self._quantities.lengths)
        copied.relength(wanted, lambda start, part: self._aligned(start, part, by_length, wanted))
        return copied.values()

    def _aligned(self, start: int, part: Part, names: list[str], wanted: list[int]) -> Part:
        own = self._lengths[start]
        values = {name: _placed(part.values[name], own, wanted) for name in names if name in part.values}
        return replace(part, values=part.values | values)


def _placed(values: Tensor, own: list[int], wanted: list[int]) -> Tensor:
    """Values by the prefixes `own`, as values by the prefixes `wanted`: NaN where they are not among them."""
    columns = [values[..., own.index(length)] if length in own else None for length in wanted]
    blank = torch.full_like(values[..., 0], torch.nan)
    return torch.stack([blank if column is None else column for column in columns], -1)
