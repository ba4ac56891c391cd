"""Sink rates of one forward pass, from the sums of its attention calls. They show whether a hidden sink moved."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.metrics.mass import ranked, received


class SinkCount:
    """Counts the heads of one pass that have a sink, for each sequence of the batch."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._found: list[tuple[Tensor, Tensor]] = []

    def receive(self, sums: AttentionSums) -> None:
        """Takes the sums of one attention call."""
        over = (received(sums.columns, sums.seen_by) > self._epsilon) & ranked(sums.seen_by)
        first = sums.columns[..., 0] / sums.first.shape[-1] > self._epsilon
        heads = torch.stack([first, over.any(-1)], -1).cpu().double()  # (batch, head, 2)
        self._found.append((heads, over.any(1).cpu()))

    @property
    def calls(self) -> int:
        """How many attention calls were counted so far."""
        return len(self._found)

    def take(self, other: SinkCount, calls: slice) -> None:
        """Takes over what another pass counted in some of its calls."""
        self._found += other._found[calls]

    def rates(self) -> Tensor:
        """Share of heads with alpha_0 > epsilon, and with alpha_k > epsilon at any key k with n_k >= n_max/4;
        [sequence, 2] float64."""
        return torch.cat([heads for heads, _ in self._found], 1).mean(1)

    @property
    def keys(self) -> Tensor:
        """The keys that are a sink of some head, bool [sequence, T]."""
        return reduce(torch.logical_or, (keys for _, keys in self._found))
