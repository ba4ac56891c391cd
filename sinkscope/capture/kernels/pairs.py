"""By how much each query prefers key 0 to its next best key, block by block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import HIDDEN_GAP, AttentionMap
from sinkscope.capture.kernels.sums import block_edges
from sinkscope.capture.kernels.walk import FLOOR, Walk


def pair_margins(call: AttentionCall | AttentionMap) -> Float[Tensor, "batch head query"] | None:
    """s_i0 - max s_ij over the other keys j that query i sees, in float32 (float64 for a float64 model).

    NaN for a query that does not see key 0, or sees nothing else. A learned sink is no key, and is left out. None where
    the score is not softmax, and where a map was formed by the model whose logits were not seen.
    """
    if isinstance(call, AttentionMap):
        return _of_map(call)
    if call.score != "softmax":
        return None
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    walk = _PairWalk(call, batch, groups, heads // groups, queries, keys)
    walk.pairs = torch.full_like(walk.first, torch.nan)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device):
        walk.block(start, stop)
    return walk.pairs.flatten(1, 2)


def _of_map(seen: AttentionMap) -> Tensor | None:
    if seen.logits is None:
        return None
    logits = seen.logits[..., : seen.probabilities.shape[-1]].to(seen.dtype)
    shown = logits > seen.logits.to(seen.dtype).amax(-1, keepdim=True) - HIDDEN_GAP
    return _margins(logits.masked_fill(~shown, -torch.inf))


class _PairWalk(Walk):
    """A walk that takes these margins in place of all sums."""

    pairs: Tensor

    def block(self, start: int, stop: int) -> None:
        """Takes the margins of queries start..stop."""
        rows, seen, logits = self._begin(start, stop)
        if seen.low:
            return
        self._hide(logits, seen, -torch.inf)
        self.pairs[..., rows] = _margins(logits.masked_fill(logits <= FLOOR / 2, -torch.inf))


def _margins(logits: Tensor) -> Tensor:
    """From logits that are -inf where a query does not see a key."""
    if logits.shape[-1] < 2:
        return torch.full_like(logits[..., 0], torch.nan)
    margins = logits[..., 0] - logits[..., 1:].amax(-1)
    return margins.masked_fill(~margins.isfinite(), torch.nan)
