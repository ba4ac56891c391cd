"""Sink rates of one forward pass, from the sums of its attention calls. They show whether a hidden sink moved."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.metrics.mass import ranked, received


class SinkCount:
    """Counts the heads of one pass that have a sink, for each sequence of the batch."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._found: list[Tensor] = []
        self._keys: Tensor | None = None

    def receive(self, sums: AttentionSums) -> None:
        """Takes the sums of one attention call."""
        over = (received(sums.columns, sums.seen_by) > self._epsilon) & ranked(sums.seen_by)
        first = sums.columns[..., 0] / sums.first.shape[-1] > self._epsilon
        self._found.append(torch.stack([first, over.any(-1)], -1).cpu().double())  # (batch, head, 2)
        anywhere = over.any(1).cpu()
        self._keys = anywhere if self._keys is None else self._keys | anywhere

    def rates(self) -> Tensor:
        """Share of heads with alpha_0 > epsilon, and with alpha_k > epsilon at any key k with n_k >= n_max/4;
        [sequence, 2] float64."""
        return torch.cat(self._found, 1).mean(1)

    @property
    def keys(self) -> Tensor:
        """The keys that are a sink of some head, bool [sequence, T]."""
        assert self._keys is not None
        return self._keys
