"""Reads plain softmax attention on a CPU with one compiled loop over the rows of each block of logits.

In torch, the mask, the largest logit, the exponentials and each sum are passes of their own, about ten in all. The
products of matrices stay torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import EARLY, PAIR_MARGINS, AttentionSums
from sinkscope.capture.kernels.walk import Walk

LARGEST = 1e37
"""A bound on every logit below which none can overflow float32."""

UNDERSTOOD = frozenset({"query", "key", "value", "mask", "causal", "scaling", "window"})
"""The fields of a call that the loop computes; a call that sets another one is left to `walk`."""


def supports(call: AttentionCall) -> bool:
    """Whether the loop computes a call: softmax of plain scaled dot products on a CPU, summed in float32, where every
    query's keys are contiguous and no logit can be infinite or NaN."""
    return (
        not call.beyond(UNDERSTOOD)
        and call.lengths[0] * call.lengths[1] >= loops.LEAST
        and all(loops.reads(tensor) for tensor in (call.query, call.key, call.value))
        and call.linear  # a mask may add a bias
        and call.visible.spans is not None
        and _bound(call) < LARGEST  # False where it is NaN
        and loops.loops("attention") is not None
    )


def _bound(call: AttentionCall) -> float:
    """A number that no logit exceeds in size (Cauchy and Schwarz); NaN or infinite where a query or key is."""
    query, key = (float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for tensor in (call.query, call.key))
    return abs(call.scaling) * query * key


class CompiledWalk(Walk):
    """The running sums of one call that `supports` accepts. Each block's logits become probabilities in one pass."""

    def __init__(self, call: AttentionCall, batch: int, groups: int, repeat: int, queries: int, keys: int) -> None:
        super().__init__(call, batch, groups, repeat, queries, keys)
        loop = loops.loops("attention")
        assert loop is not None
        assert call.visible.spans is not None
        self.loop, heads = loop, groups * repeat
        self.spans = tuple(edge.expand(batch, heads, -1).numpy() for edge in call.visible.spans)
        self.sums = torch.zeros(loop.ROW_SUMS, batch, heads, queries)
        self.sums[loop.MARGIN] = self.sums[loop.PAIR_MARGIN] = torch.nan
        places = [loop.FIRST, loop.ENTROPY, loop.MARGIN, loop.DIAGONAL, loop.PREVIOUS]
        names = ["first", "entropy", "margin", "diagonal", "previous"]
        for name, place in zip(names, places, strict=True):
            setattr(self, name, self.sums[place].view(batch, groups, repeat, queries))

    def block(self, start: int, stop: int) -> None:
        seen = self.call.visible.block(start, stop)
        logits = self._logits(start, stop, seen)
        pairs, count, width = self.columns.flatten(0, 2).shape[0], stop - start, seen.high - seen.low
        columns = torch.zeros(pairs, -(-count // self.loop.CHUNK), width)
        self._weigh(logits.view(pairs, count, width), start, seen.low, columns)
        self.columns[..., seen.low : seen.high] += columns.sum(1).view(*self.shape, width)
        if stop == EARLY:
            self.early = self.columns[..., :EARLY].clone()
        self._write(slice(start, stop), self._mix(seen, logits))

    def _weigh(self, logits: Tensor, start: int, low: int, columns: Tensor) -> None:
        largest = self.largest.flatten(1, 2).numpy()
        places = start, low, *self.spans
        loops.run(self.loop.weigh, logits.numpy(), *places, self.sums.numpy(), largest, columns.numpy())

    def finish(self) -> tuple[Tensor, AttentionSums]:
        self.call.found[PAIR_MARGINS] = self.sums[self.loop.PAIR_MARGIN]
        return super().finish()

    def _linear_gap(self) -> Tensor:
        call, gap = self.call, torch.empty_like(self.first)
        query = loops.in_rows(call.query.transpose(1, 2).unflatten(2, self.shape[1:]))
        key = loops.in_rows(call.key.transpose(1, 2))
        loops.run(self.loop.gaps, query, key, call.visible.causal and call.square, gap.numpy())
        return gap.mul_(-call.scaling).flatten(1, 2)
