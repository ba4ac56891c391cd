"""The primary record of a run: the batches of one domain, whoever measured them, in the order of their sequences."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import torch
from torch import Tensor

from sinkscope.engine.collector import Part, Parts, prefixes
from sinkscope.metrics.registry import MetricSet
from sinkscope.runs.values import SiteValues


class Record:
    """The batches of one domain. `length`: T of its longest sequence. They may come in any order, and leave gaps."""

    def __init__(self, length: int) -> None:
        self._lengths = prefixes(length)
        self._done: dict[int, tuple[int, Parts]] = {}

    def keep(self, start: int, count: int, parts: Parts) -> None:
        """Keeps the batch of the sequences `start` to `start + count`."""
        self._done[start] = count, parts

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """(first, past the last) of the sequences below `total` that are still to be measured."""
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

    def values(self, metrics: MetricSet) -> dict[str, SiteValues]:
        """Everything kept so far, by site name, in the order of the sequences."""
        joined: Parts = defaultdict(list)
        for _, parts in self._unbroken():
            for name, own in parts.items():
                joined[name] += own
        return {name: _join(parts, self._lengths, metrics) for name, parts in joined.items()}


def _join(parts: list[Part], lengths: list[int], metrics: MetricSet) -> SiteValues:
    early = [(part.early, len(part.heads)) for part in parts if part.early is not None]
    units = [part.first_unit for part in parts if part.first_unit is not None]
    smoothing = [part.smoothing for part in parts if part.smoothing is not None]
    return SiteValues(
        heads=torch.cat([part.heads for part in parts]).numpy(),
        layers=torch.cat([part.layers for part in parts]).numpy(),
        curve=torch.cat([part.curve for part in parts]).double().numpy(),
        prefixes=lengths,
        alpha=_mean_places([(part.alpha, len(part.heads)) for part in parts]),
        early=_mean_places(early) if early else None,
        first_unit=torch.cat(units).double().numpy() if units else None,
        causal=all(part.causal for part in parts),
        queries=max(part.queries for part in parts),
        keys=max(part.keys for part in parts),
        first=_mean_places([(part.first, len(part.heads)) for part in parts]),
        first_share=_mean_places([(part.first_share, len(part.heads)) for part in parts]),
        massive=Counter(tuple(pair) for part in parts if part.massive is not None for pair in part.massive.tolist()),
        smoothing=torch.cat(smoothing).numpy() if smoothing else None,
        metrics=metrics,
    )


def _mean_places(sums: list[tuple[Tensor, int]]) -> np.ndarray:
    """Mean over sequences of a value a position, [H, K]; a position that only some sequences reach: over those."""
    total = torch.zeros(sums[0][0].shape[1], max(part.shape[-1] for part, _ in sums), dtype=torch.float64)
    number = torch.zeros(total.shape[-1], dtype=torch.float64)
    for part, count in sums:
        total[:, : part.shape[-1]] += part[0]
        number[: part.shape[-1]] += count
    return (total / number).numpy()
