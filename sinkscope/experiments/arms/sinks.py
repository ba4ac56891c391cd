"""Sink rates of forward passes, from the sums of their attention calls. They show whether a hidden sink moved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.metrics.mass import eligible_keys, query_rows


class SinkCount:
    """Counts the heads that have a sink, for each sequence; a forward pass has `calls` attention calls."""

    def __init__(self, epsilon: float, calls: int) -> None:
        self._epsilon, self._calls = epsilon, calls
        self._found: list[Tensor] = []

    def receive(self, sums: AttentionSums) -> None:
        """Takes the sums of one attention call on one batch."""
        queries, keys = sums.first.shape[-1], sums.columns.shape[-1]
        alpha = sums.columns / query_rows(sums.columns, queries, sums.causal)
        over = alpha[..., : eligible_keys(queries, keys, sums.causal)] > self._epsilon
        self._found.append(torch.stack([over[..., 0], over.any(-1)], -1).cpu().double())  # (batch, head, 2)

    def rates(self) -> dict[str, float]:
        """Share of (sequence, head) pairs with alpha_0 > epsilon, and with alpha_k > epsilon at any key k that has at
        least T/4 query rows."""
        passes = range(0, len(self._found), self._calls)
        whole = torch.cat([torch.cat(self._found[start : start + self._calls], 1).mean(1) for start in passes])
        first, anywhere = np.asarray(whole.mean(0))
        return {"sink_rate_first": float(first), "sink_rate_any": float(anywhere)}
