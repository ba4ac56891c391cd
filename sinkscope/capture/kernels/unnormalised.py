"""The walk that sums attention of another score than softmax (`capture.scores`).

It differs from the softmax walk in the step from logits to A, and in the meaning of a row's sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.kernels.walk import Walk
from sinkscope.capture.scores import Score, score_of

Kind = TypeVar("Kind", bound=Walk)


class UnnormalisedWalk(Walk):
    """Sums of raw A. Entropy, margin and learned-sink mass are NaN: they are defined for a softmax alone.

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
        weights = self.score.finish(weights)
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


def walk_of(score: str, softmax: Callable[..., Kind], other: Callable[..., Kind]) -> Callable[..., Kind]:
    """What computes a call of that score: `softmax`, or `other`, a kind of UnnormalisedWalk, with the score's function.

    Raises SinkscopeError for an unknown score.
    """
    return softmax if score == "softmax" else partial(other, score=score_of(score))
