"""The primary record of a run: keeps the batches of a domain, from any process, and joins them in sequence order."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from sinkscope.engine.collector import Part, Parts, prefixes
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import EVENT, EVENT_FIELDS, Quantity, QuantitySet
from sinkscope.runs.values import SiteValues


class Record:
    """The batches of one domain. They may come in any order, and leave gaps.

    `length`: T of the longest sequence. `quantities`: what was measured.
    """

    def __init__(self, length: int, quantities: QuantitySet) -> None:
        self._lengths = prefixes(length, quantities.lengths)
        self._quantities = quantities
        self._done: dict[int, tuple[int, Parts]] = {}

    def keep(self, start: int, count: int, parts: Parts) -> None:
        """Keeps the batch of the sequences `start` to `start + count`."""
        self._done[start] = count, parts

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """Returns (first, past the last) of each run of sequences below `total` that is still to be measured."""
        edges = [0, *(edge for start in sorted(self._done) for edge in (start, start + self._done[start][0])), total]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]

    @property
    def count(self) -> int:
        """Sequences kept without a gap from the first on: those that `values` holds."""
        return sum(count for count, _ in self._unbroken())

    def _unbroken(self) -> list[tuple[int, Parts]]:
        kept: list[tuple[int, Parts]] = []
        expected = 0
        while expected in self._done:
            kept.append(self._done[expected])
            expected += kept[-1][0]
        return kept

    def values(self) -> dict[str, SiteValues]:
        """Returns the values of the sequences before the first gap, by site name, in the order of the sequences."""
        joined: Parts = defaultdict(list)
        for _, parts in self._unbroken():
            for name, own in parts.items():
                joined[name] += own
        return {name: self._site(parts) for name, parts in joined.items()}

    def _site(self, parts: list[Part]) -> SiteValues:
        joined = {each.name: _join(each, parts) for each in self._quantities.quantities}
        return SiteValues(
            quantities=self._quantities,
            arrays={name: array for name, array in joined.items() if array is not None},
            lengths=self._lengths,
            count=sum(part.count for part in parts),
            causal=all(part.causal for part in parts),
            queries=max(part.queries for part in parts),
            keys=max(part.keys for part in parts),
        )


def _join(quantity: Quantity, parts: list[Part]) -> np.ndarray | None:
    """Joins one quantity over all batches as its axes say; None where no batch has it.

    Raises SinkscopeError where an axis that must be the same in all batches is not.
    """
    if quantity.dims == EVENT:
        return _numbered(quantity.name, parts)
    present = [(part.values[quantity.name], part.count) for part in parts if quantity.name in part.values]
    if not present:
        return None
    if quantity.summed:
        return _mean_places(present)
    if quantity.dims[0] != "sequence":
        return torch.cat([values for values, _ in present]).numpy()
    shape = present[0][0].shape[1:]
    rows = [part.values.get(quantity.name, torch.full((part.count, *shape), torch.nan)) for part in parts]
    other = next((row.shape[1:] for row in rows if row.shape[1:] != shape), None)
    if other is not None:
        raise SinkscopeError(
            f"quantity {quantity.name}: its axes ({', '.join(quantity.dims[1:])}) have {list(shape)} in one batch and "
            f"{list(other)} in another; only key, query and early may differ"
        )
    return torch.cat([row.double() for row in rows]).numpy()


def _numbered(name: str, parts: list[Part]) -> np.ndarray | None:
    """Returns the events of all batches, whose sequences then count from the domain's first; None without any part."""
    starts = itertools.accumulate((part.count for part in parts), initial=0)
    rows = [
        (part.values[name].double(), start) for part, start in zip(parts, starts, strict=False) if name in part.values
    ]
    shift = torch.tensor([field == "sequence" for field in EVENT_FIELDS], dtype=torch.float64)
    return torch.cat([events + start * shift for events, start in rows]).numpy() if rows else None


def _mean_places(sums: list[tuple[Tensor, int]]) -> np.ndarray:
    """Returns the mean over sequences at each position (the last axis), from (sum [1, ..., position], sequences).

    At a position that some sequences do not reach, it is the mean over the others.
    """
    longest = max(part.shape[-1] for part, _ in sums)
    total = torch.zeros(*sums[0][0].shape[1:-1], longest, dtype=torch.float64)
    number = torch.zeros(longest, dtype=torch.float64)
    for part, count in sums:
        total[..., : part.shape[-1]] += part[0]
        number[: part.shape[-1]] += count
    return (total / number).numpy()
