"""The block walk for scores that are not softmax (`capture.scores`): raw attention, whose rows are no distribution.

The softmax walk stays as it is; this one differs in the step from logits to A, and in what a row's sums mean.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.blocks import WALKS, Walk
from sinkscope.capture.scores import SCORES, Score
from sinkscope.capture.sums import AttentionCall, AttentionSums


class UnnormalisedWalk(Walk):
    """Sums of raw A. Entropy, margin and learned-sink mass have no meaning without a distribution: NaN."""

    def __init__(self, call: AttentionCall, *sizes: Any, score: Score) -> None:
        super().__init__(call, *sizes)
        self.score = score
        self.total = torch.zeros_like(self.first)
        for rows in (self.entropy, self.margin, self.learned):
            rows.fill_(torch.nan)

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum, and writes their output."""
        seen = self.call.visible.block(start, stop, whole=not self.call.linear)
        rows = slice(start, stop)
        logits = self._logits(start, stop, seen)
        if not self.call.linear:
            self.gap[..., rows] = self._row_gap(logits, seen, start)
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


WALKS |= {name: partial(UnnormalisedWalk, score=score) for name, score in SCORES.items()}
