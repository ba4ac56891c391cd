"""What an attention call leaves behind: O(T) numbers a head, never T x T.

METRICS' notation: A[i, j] is the probability query i gives key j, after mask, soft-cap, window and learned sink.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EARLY = 64
"""Gu et al. 2410.10781 measure sinks at T = 64: columns are also kept as they stood after query 63."""


BLOCK_BYTES = 4 * 2**20
"""Logits held at once on a CPU: about the cores' own caches (0.5 to 16 MiB tried; 2 to 8 are alike)."""

DEVICE_BLOCK_BYTES = 256 * 2**20
"""The same on an accelerator, where large launches pay."""


@dataclass
class AttentionSums:
    """What one call leaves behind: O(T) numbers a head, float32. A = attention probabilities.

    Where the score is no softmax, A is the raw score: entropy, margin and learned_sink are NaN, masses are raw.

    Attributes:
        first: A[i, 0] of every query. last-dimension index i throughout.
        diagonal, previous: A[i, i] and A[i, i-1]; None where queries are not the keys (cross-attention).
        entropy: -sum_j A log A over keys, nats.
        margin: log(A[i, 0] / (1 - A[i, 0])) from logits; NaN where query i cannot see key 0 or sees nothing else.
        learned_sink: 1 - sum_j A[i, j], taken by learned sink logits; exactly 0 without them.
        first_is_largest: key 0 has the row's largest probability (ties count for key 0).
        logit_gap: s_i0 minus the mean of s_ij over the keys j the causal order allows, before mask and window.
        columns: sum_i A[i, k] of every key k.
        early_columns: the same over the first 64 queries, keys 0..63; None where Tq < 64.
        visible: number of keys each query may see, (b | 1, h | 1, query).
        causal: no query sees a later key.
        row_total: sum_j |A[i, j]| where the rows are no distribution; None for softmax, whose rows sum to
            1 - learned_sink.
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
    causal: bool
    row_total: Float[Tensor, "batch head query"] | None = None

    @property
    def first_share(self) -> Float[Tensor, "batch head query"]:
        """|A[i,0]| / sum_j |A[i,j]|, 0 where the row is 0: Gu et al. 2410.10781's proxy for attention that is not
        normalised. A[i,0] itself in a plain softmax; among keys alone where a learned sink takes its part."""
        total = 1 - self.learned_sink if self.row_total is None else self.row_total
        return torch.where(total > 0, self.first.abs() / total, 0.0)

    def rows(self, count: int) -> AttentionSums:
        """The sums of the first `count` sequences; an axis of size 1 that all sequences share stays."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {name: value[:count] for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **cut)


def block_edges(
    queries: int, row_bytes: int, device: torch.device, block_bytes: int | None = None
) -> list[tuple[int, int]]:
    """Cuts 0..queries into blocks of a multiple of 16 rows, with an edge at EARLY where there are as many queries."""
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    rows = max(16, block_bytes // row_bytes // 16 * 16)
    edges = sorted({*range(0, queries, rows), *((EARLY,) if queries > EARLY else ()), queries})
    return list(itertools.pairwise(edges))
