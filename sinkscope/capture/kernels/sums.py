"""What is kept of an attention call: O(T) numbers for each head, never T x T.

A[i, j] is the probability that query i gives to key j, after mask, soft-cap, window and learned sink.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EARLY = 64
"""Gu et al. 2410.10781 measure sinks at T = 64, so the column sums after query 63 are kept too."""

PAIR_MARGINS = "pair_margins"
"""The name in `AttentionCall.found` of what `per_query.pair_margins` returns."""


BLOCK_BYTES = 4 * 2**20
"""Bytes of logits held at once on a CPU, near the size of its caches. Of 0.5 to 16 MiB, 2 to 8 are equally fast."""

DEVICE_BLOCK_BYTES = 256 * 2**20
"""Bytes of logits held at once on an accelerator, where large launches are faster."""


@dataclass
class AttentionSums:
    """Sums over the attention probabilities A of one call, in float32 (float64 for a float64 model).

    Where the score is not softmax, A is the unnormalised weight: entropy, margin and learned_sink are NaN, and all sums
    are of that A. The last axis of a row sum is the query i.

    Attributes:
        first: A[i, 0].
        diagonal, previous: A[i, i] and A[i, i-1]; None where queries are not the keys (cross-attention).
        entropy: -sum_j A[i, j] log A[i, j] over keys, in nats.
        margin: log(A[i, 0] / (1 - A[i, 0])) from logits; NaN where query i cannot see key 0 or sees nothing else.
        learned_sink: 1 - sum_j A[i, j], the mass of learned sink logits; exactly 0 without them.
        first_is_largest: key 0 has the row's largest probability (ties count for key 0).
        logit_gap: s_i0 minus the mean of s_ij over the keys j that the causal order allows, before mask and window.
            Where the mask adds a finite bias, the mean is over the keys that query i sees.
        columns: sum_i A[i, k] for every key k.
        early_columns: the same sum over queries 0..63, for keys 0..63; None where Tq < 64.
        visible: the number of keys that each query may see, (b | 1, h | 1, query).
        sees_first: whether each query may see key 0, shaped like visible.
        sees_few: the number of the keys 0..3 that each query may see, shaped like visible.
        seen_by: the number of queries that may see each key, (b | 1, h | 1, key).
        early_seen_by: the same among queries 0..63, for keys 0..63; None where Tq < 64.
        causal: no query sees a later key.
        row_total: sum_j |A[i, j]|; None where it is 1 in each row with a key: softmax without learned sinks. With them
            it is summed over the keys: 1 - learned_sink would cancel where the sink takes nearly the whole row.
        signed_total: sum_j A[i, j], where some are negative: heads mixed behind the softmax. None elsewhere.
        of_mask: what functions have found that ask the mask alone; calls that share a mask share it.
    """

    first: Float[Tensor, "batch head query"]
    diagonal: Float[Tensor, "batch head query"] | None
    previous: Float[Tensor, "batch head query"] | None
    entropy: Float[Tensor, "batch head query"]
    margin: Float[Tensor, "batch head query"]
    learned_sink: Float[Tensor, "batch head query"]
    first_is_largest: Bool[Tensor, "batch head query"]
    logit_gap: Float[Tensor, "batch head query"]
    columns: Float[Tensor, "batch head key"]
    early_columns: Float[Tensor, "batch head early"] | None
    visible: Tensor
    sees_first: Tensor
    sees_few: Tensor
    seen_by: Int[Tensor, "_ _ key"]
    early_seen_by: Int[Tensor, "_ _ early"] | None
    causal: bool
    row_total: Float[Tensor, "batch head query"] | None = None
    signed_total: Float[Tensor, "batch head query"] | None = None
    of_mask: dict[Any, Tensor | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def of_shares(self) -> bool:
        """Whether every row is a distribution over its keys and learned sinks."""
        return self.row_total is None or not bool(self.learned_sink.isnan().all())

    @property
    def total(self) -> Float[Tensor, "batch head query"]:
        """sum_j |A[i,j]|; 0 for a query that sees no key."""
        if self.row_total is None:
            return (self.visible > 0).to(self.first.dtype).expand_as(self.first)
        return self.row_total

    @property
    def first_share(self) -> Float[Tensor, "batch head query"]:
        """|A[i,0]| / sum_j |A[i,j]|, 0 where the row is 0: Gu et al. 2410.10781's proxy for attention that is not
        normalised. For plain softmax it is A[i,0]; with a learned sink it is key 0's share of the keys' mass."""
        if self.row_total is None:
            return self.first
        return torch.where(self.row_total > 0, self.first.abs() / self.row_total, 0.0)

    def rows(self, count: int) -> AttentionSums:
        """The sums of the first `count` sequences; a batch axis of size 1 that all sequences share stays."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        cut: dict[str, Any] = {name: value[:count] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, of_mask={}, **cut)


def block_edges(
    queries: int, row_bytes: int, device: torch.device, block_bytes: int | None = None, early: int = EARLY
) -> list[tuple[int, int]]:
    """Cuts 0..queries into blocks of a multiple of 16 rows. Where `early` is inside, there is an edge."""
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    rows = max(16, block_bytes // row_bytes // 16 * 16)
    edges = sorted({*range(0, queries, rows), *((early,) if 0 < early < queries else ()), queries})
    return list(itertools.pairwise(edges))


def running_sum(rows: Float[Tensor, "*batch row number"]) -> Float[Tensor, "*batch row number"]:
    """The sum of each row and those before it. torch walks down the rows of a column one after the other, which leaves
    an accelerator idle; along the last axis it sums in parallel."""
    return rows.cumsum(-2) if rows.device.type == "cpu" else rows.mT.contiguous().cumsum(-1).mT
