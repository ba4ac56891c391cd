"""The primary record of a run: keeps the batches of a domain, from any process, and joins them in sequence order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.collector import Part, Parts, prefixes
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import STRETCHED, UNSEEN, Quantity, QuantitySet
from sinkscope.metrics.stretches import joined
from sinkscope.tables.values import SiteValues


class BatchRecord:
    """The batches of one domain. They may come in any order, and leave gaps. `quantities`: what was measured."""

    def __init__(self, quantities: QuantitySet) -> None:
        self._quantities = quantities
        self._done: dict[int, tuple[int, Parts]] = {}
        self._totals: dict[tuple[str, str], Total] = {}
        self._unbroken: list[int] = []
        self._count = 0

    def keep(self, start: int, count: int, parts: Parts) -> None:
        """Keeps the batch of the sequences `start` to `start + count`.

        What is a mean over sequences is added to a running total once no sequence before it is missing: memory for it
        does not grow with the number of batches, and the order of the sum is that of the sequences.
        """
        self._done[start] = count, parts
        while self._count in self._done:
            count, parts = self._done[self._count]
            rest = {name: [self._added(name, part) for part in site_parts] for name, site_parts in parts.items()}
            self._done[self._count] = count, rest
            self._unbroken.append(self._count)
            self._count += count

    def _added(self, site: str, part: Part) -> Part:
        """Adds the part to the running totals and returns what is left of it."""
        rest = dict(part.values)
        for quantity in self._quantities.quantities:
            total = new_total(quantity) if quantity.name in rest else None
            if total is not None:
                self._totals.setdefault((site, quantity.name), total).add(rest.pop(quantity.name), part.count)
        return replace(part, values=rest)

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """Returns (first, past the last) of each run of sequences below `total` that is still to be measured."""
        edges = [0, *(edge for start in sorted(self._done) for edge in (start, start + self._done[start][0])), total]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]

    @property
    def count(self) -> int:
        """Sequences kept without a gap from the first on: those that `values` holds."""
        return self._count

    def values(self) -> dict[str, SiteValues]:
        """Hands over the values of the sequences before the first gap, by site name, in the order of the sequences.

        The record then holds none of them: of many sequences, both together would fill memory.
        """
        joined: Parts = defaultdict(list)
        for start in self._unbroken:
            count, parts = self._done[start]
            self._done[start] = count, {}
            for name, site_parts in parts.items():
                joined[name] += site_parts
        return {name: self._site(name, joined.pop(name)) for name in [*joined]}

    def _site(self, site: str, parts: list[Part]) -> SiteValues:
        queries = max(part.queries for part in parts)
        lengths = prefixes(queries, self._quantities.lengths)
        parts = [self._at(lengths, part) for part in parts]
        joined = {quantity.name: _join(quantity, parts) for quantity in self._quantities.quantities}
        totals = {name: total for (total_site, name), total in self._totals.items() if total_site == site}
        joined |= {name: total.result(totals.get(UNSEEN.get(name, ""))) for name, total in totals.items()}
        return SiteValues(
            quantities=self._quantities,
            arrays={name: array for name, array in joined.items() if array is not None},
            lengths=lengths,
            count=sum(part.count for part in parts),
            causal=all(part.causal for part in parts),
            queries=queries,
            keys=max(part.keys for part in parts),
        )

    def _at(self, lengths: list[int], part: Part) -> Part:
        """The part with its values by prefix at these lengths: NaN at those that its sequences do not reach."""
        own = prefixes(part.queries, self._quantities.lengths)
        if own == lengths:
            return part
        names = [quantity.name for quantity in self._quantities.quantities if quantity.dims[-1] == "length"]
        placed = {name: _placed(part.values[name], own, lengths) for name in names if name in part.values}
        return replace(part, values=part.values | placed)


def _placed(values: Tensor, own: list[int], wanted: list[int]) -> Tensor:
    """Values by the prefixes `own`, as values by the prefixes `wanted`: NaN where they are not among them."""
    columns = [values[..., own.index(length)] if length in own else None for length in wanted]
    blank = torch.full_like(values[..., 0], torch.nan)
    return torch.stack([blank if column is None else column for column in columns], -1)


def _join(quantity: Quantity, parts: list[Part]) -> np.ndarray | None:
    """Joins one quantity over all batches as its axes say; None where no batch has it.

    Raises SinkscopeError where an axis that must be the same in all batches is not.
    """
    if quantity.of_events:
        return _numbered(quantity.name, parts)
    present = [(part.values[quantity.name], part.count) for part in parts if quantity.name in part.values]
    if not present:
        return None
    if quantity.dims[0] != "sequence":
        return torch.cat([values for values, _ in present]).numpy()
    shape = present[0][0].shape[1:]
    rows = [part.values.get(quantity.name, torch.full((part.count, *shape), torch.nan)) for part in parts]
    other_shape = next((row.shape[1:] for row in rows if row.shape[1:] != shape), None)
    if other_shape is not None:
        raise SinkscopeError(
            f"quantity {quantity.name}: its axes ({', '.join(quantity.dims[1:])}) have {list(shape)} in one batch and "
            f"{list(other_shape)} in another; only key, query and early may differ"
        )
    return torch.cat([row.double() for row in rows]).numpy()


def _numbered(name: str, parts: list[Part]) -> np.ndarray | None:
    """Returns the events of all batches, whose sequences then count from the domain's first; None without any part."""
    starts = itertools.accumulate((part.count for part in parts), initial=0)
    rows = [
        (part.values[name].double(), start) for part, start in zip(parts, starts, strict=False) if name in part.values
    ]
    if not rows:
        return None
    shift = torch.zeros(rows[0][0].shape[1], dtype=torch.float64)
    shift[0] = 1  # the sequence
    return torch.cat([events + start * shift for events, start in rows]).numpy()


class Total(Protocol):
    """A running total."""

    def add(self, values: Tensor, count: int) -> None:
        """Adds what a batch kept of its `count` sequences, [1, ...]."""

    def result(self, unseen: Total | None = None) -> np.ndarray:
        """What a run holds of all sequences so far. `unseen`: in how many of them there is no value (UNSEEN)."""


def new_total(quantity: Quantity) -> Total | None:
    """An empty total; None for a quantity of which a run holds every sequence."""
    if quantity.dims == STRETCHED:
        return Stretches()
    return PlaceTotals() if quantity.summed else None


class PlaceTotals:
    """A quantity by position: the sum at each position (the last axis), and how many sequences reach it."""

    def __init__(self) -> None:
        self._sum = torch.zeros(0)
        self._number = torch.zeros(0, dtype=torch.float64)

    def add(self, values: Tensor, count: int) -> None:
        added, before, size = values[0], len(self._number), values.shape[-1]
        if size > before:
            longer = torch.zeros_like(added)
            longer[..., :before] = self._sum
            self._sum, self._number = longer, pad(self._number, (0, size - before))
        self._sum[..., :size] += added
        self._number[:size] += count

    def result(self, unseen: Total | None = None) -> np.ndarray:
        """The mean at each position, over the sequences that reach it and have a value there."""
        number = self._number.to(self._sum.dtype)
        if isinstance(unseen, PlaceTotals):
            number = number - pad(unseen._sum, (0, len(number) - unseen._sum.shape[-1]))
        elif bool((number == 1).all()):
            return self._sum.numpy()  # not copied: of one long sequence, this is most of what a scan holds
        return (self._sum / number).numpy()


class Stretches:
    """Stretches of positions."""

    def __init__(self) -> None:
        self._parts = torch.zeros(0)

    def add(self, values: Tensor, count: int) -> None:
        self._parts = joined(self._parts, values) if len(self._parts) else values

    def result(self, unseen: Total | None = None) -> np.ndarray:
        """`stretches.PARTS` of each stretch, [head, stretch, 4]."""
        return self._parts[0].numpy()


# The record of a domain whose longest sequence is not known before the last has come.


class GrowingRecord:
    """Batches of sequences of any length, in the order in which they come. `quantities`: what was measured."""

    def __init__(self, quantities: QuantitySet) -> None:
        self._record = BatchRecord(quantities)
        self.longest = 0

    @property
    def count(self) -> int:
        """Sequences so far."""
        return self._record.count

    def keep(self, length: int, count: int, parts: Parts) -> None:
        """Keeps a batch of `count` sequences, whose longest has `length` tokens."""
        self.longest = max(self.longest, length)
        self._record.keep(self._record.count, count, parts)

    def values(self) -> dict[str, SiteValues]:
        """The values of all sequences so far, by site name; more may come afterwards."""
        return deepcopy(self._record).values()
