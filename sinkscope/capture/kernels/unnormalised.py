"""Scores other than softmax, whose rows are no distribution, and the walk that sums raw attention.

A model chooses a score with the keyword `score` of its attention call; see `AttentionCall.score`. Each score takes
logits (..., query, key) and the queries' positions i as (query, 1), and returns A before the causal mask. This walk
differs from the softmax walk in the step from logits to A, and in the meaning of a row's sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.kernels.walk import Walk

Score = Callable[[Tensor, Tensor], Tensor]


def relu(logits: Tensor, rows: Tensor) -> Tensor:
    """A[i,t] = relu(s_it) / max(i, 1), Ran-Milo 2603.11487. A row may sum to any number from 0 on."""
    return torch.relu(logits) / rows.clamp(min=1)


def sigmoid(logits: Tensor, rows: Tensor) -> Tensor:
    """A[i,t] = sigmoid(s_it): each key independent of the others, without normalisation."""
    return torch.sigmoid(logits)


SCORES: dict[str, Score] = {"relu": relu, "sigmoid": sigmoid}


class UnnormalisedWalk(Walk):
    """Sums of raw A. Entropy, margin and learned-sink mass are NaN: they have no meaning without a distribution.

    Learned sinks are no part of such a call: their logits stand in the softmax's denominator.
    """

    UNDERSTOOD = Walk.UNDERSTOOD - {"sinks"} | {"score"}

    def __init__(self, call: AttentionCall, *sizes: Any, score: Score) -> None:
        super().__init__(call, *sizes)
        self.score = score
        self.total = torch.zeros_like(self.first)
        for rows in (self.entropy, self.margin, self.learned):
            rows.fill_(torch.nan)

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum, and writes their output."""
        rows, seen, logits = self._begin(start, stop)
        weights = self.score(logits, torch.arange(start, stop, device=logits.device)[:, None])
        self._hide(weights, seen, 0.0)
        sizes = weights.abs()
        self.total[..., rows] = sizes.sum(-1)
        if seen.low == 0:
            self.first[..., rows] = weights[..., 0]
            self.largest[..., rows] = (sizes[..., 0] >= sizes.amax(-1)) & (sizes[..., 0] > 0)
        one = torch.ones_like(self.total[..., rows])
        self._column_sums(seen, weights, one, stop)
        self._output(rows, seen, weights, one)

    def finish(self) -> tuple[Tensor, AttentionSums]:
        output, sums = super().finish()
        sums.row_total = self.total.flatten(1, 2)
        return output, sums
