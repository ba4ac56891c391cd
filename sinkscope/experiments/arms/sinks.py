"""Sink rates of one forward pass, from the sums of its attention calls. They show whether a hidden sink moved."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.metrics.mass import eligible_keys, query_rows


class SinkCount:
    """Counts the heads of one pass that have a sink, for each sequence of the batch."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._found: list[Tensor] = []
        self._keys: Tensor | None = None

    def receive(self, sums: AttentionSums) -> None:
        """Takes the sums of one attention call."""
        queries, keys = sums.first.shape[-1], sums.columns.shape[-1]
        alpha = sums.columns / query_rows(sums.columns, queries, sums.causal)
        over = alpha > self._epsilon
        over[..., eligible_keys(queries, keys, sums.causal) :] = False
        self._found.append(torch.stack([over[..., 0], over.any(-1)], -1).cpu().double())  # (batch, head, 2)
        anywhere = over.any(1).cpu()
        self._keys = anywhere if self._keys is None else self._keys | anywhere

    def rates(self) -> Tensor:
        """Share of heads with alpha_0 > epsilon, and with alpha_k > epsilon at any key k that has at least T/4 query
        rows; [sequence, 2] float64."""
        return torch.cat(self._found, 1).mean(1)

    @property
    def keys(self) -> Tensor:
        """The keys that are a sink of some head, bool [sequence, T]."""
        assert self._keys is not None
        return self._keys
