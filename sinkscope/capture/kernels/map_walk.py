"""The sums of `walk`, taken from an attention map that the model's own code has formed.

The map is read in blocks of queries, one layer at a time, and not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import EARLY, AttentionSums, block_edges

HIDDEN_GAP = 5000.0
"""A key counts as masked where its logit is this far below the row's largest. Models mask by adding -1e4 or lower, and
logits computed from weights never spread that far. The key's probability is exactly 0 in every dtype."""

NORMALISED = 1e-3
"""A map that was changed after its softmax still counts as a distribution where its rows sum to 1 within this."""


@dataclass
class AttentionMap:
    """One call's attention map, and the tensors around it that were seen.

    Attributes:
        probabilities: (B, H, Tq, Tk), the factor of the values.
        logits: (B, H, Tq, >= Tk), the softmax's input; None where the map was changed after the softmax. Logits beyond
            Tk are those of learned sinks.
        query, key, value, output: (B, H, Tq, d), (B, G, Tk, d), (B, G, Tk, dv), (B, Tq, H, dv); None where not seen.
    """

    probabilities: Tensor
    logits: Tensor | None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to sum in: float64 for a float64 map, else float32."""
        return torch.float64 if self.probabilities.dtype == torch.float64 else torch.float32

    def shares(self, rows: slice) -> Tensor:
        """The probabilities of these queries in `dtype`; those in half precision are recomputed from their logits."""
        if self.logits is None or self.logits.dtype in (torch.float32, torch.float64):
            return self.probabilities[:, :, rows].to(self.dtype)
        return self.logits[:, :, rows].to(self.dtype).softmax(-1)[..., : self.probabilities.shape[-1]]


def map_sums(seen: AttentionMap, block_bytes: int | None = None) -> AttentionSums:
    """AttentionSums from a map. Probabilities in half precision are recomputed from their logits.

    logit_gap is NaN for a query that does not see all keys that its causal order allows, because the logits of masked
    keys are lost. Without logits, margin and logit_gap are NaN and a probability of 0 counts as masked.
    """
    walk = _MapWalk(seen)
    batch, heads, queries, keys = seen.probabilities.shape
    for start, stop in block_edges(queries, 2 * batch * heads * keys * 4, seen.probabilities.device, block_bytes):
        walk.block(start, stop)
    return walk.finish()


class _MapWalk:
    def __init__(self, seen: AttentionMap) -> None:
        self.seen = seen
        batch, heads, queries, keys = seen.probabilities.shape
        self.queries, self.keys = queries, keys
        self.dtype = seen.dtype

        def rows() -> Tensor:
            return torch.full((batch, heads, queries), torch.nan, dtype=self.dtype, device=seen.probabilities.device)

        self.first, self.diagonal, self.previous = rows(), rows(), rows()
        self.entropy, self.total, self.margin, self.gap = rows(), rows(), rows(), rows()
        self.largest = torch.zeros_like(self.first, dtype=torch.bool)
        self.visible = torch.zeros_like(self.first, dtype=torch.long)
        self.sees_first = torch.zeros_like(self.largest)
        self.columns = self.first.new_zeros(batch, heads, keys)
        self.early: Tensor | None = None
        self.seen_by = self.visible.new_zeros(batch, heads, keys)
        self.early_seen_by: Tensor | None = None
        self.later = False

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum."""
        rows = slice(start, stop)
        shares = self.seen.shares(rows)
        if self.seen.logits is None:
            shown = shares > 0
            peak = shares.amax(-1)
            self.largest[..., rows] = (shares[..., 0] >= peak) & shown[..., 0]
        else:
            shown = self._from_logits(rows, self.seen.logits[:, :, rows].to(self.dtype))
        self.visible[..., rows] = shown.sum(-1)
        self.sees_first[..., rows] = shown[..., 0]
        self.later |= bool(shown.triu(start + 1).any())
        self.seen_by += shown.sum(-2)
        self.first[..., rows] = shares[..., 0]
        self.entropy[..., rows] = torch.special.entr(shares).sum(-1)
        self.total[..., rows] = shares.sum(-1)
        self.columns += shares.sum(-2)
        if stop == EARLY:
            self.early = self.columns[..., :EARLY].clone()
            self.early_seen_by = self.seen_by[..., :EARLY].clone()
        diagonal, before = shares.diagonal(start, -2, -1), shares.diagonal(start - 1, -2, -1)
        self.diagonal[..., start : start + diagonal.shape[-1]] = diagonal
        skip = 1 if start == 0 else 0
        self.previous[..., start + skip : start + skip + before.shape[-1]] = before

    def _from_logits(self, rows: slice, logits: Tensor) -> Tensor:
        """Fills margin, gap and largest for a block of queries; returns which keys each query sees."""
        peak = logits.amax(-1, keepdim=True)
        shown = logits > peak - HIDDEN_GAP
        kept = logits.masked_fill(~shown, -torch.inf)
        margin = kept[..., 0] - kept[..., 1:].logsumexp(-1)
        self.margin[..., rows] = margin.masked_fill(~margin.isfinite(), torch.nan)
        shown = shown[..., : self.keys]
        inside = logits[..., : self.keys]
        self.largest[..., rows] = (inside[..., 0] >= inside.amax(-1)) & shown[..., 0]
        mean = inside.masked_fill(~shown, 0.0).sum(-1) / shown.sum(-1)
        self.gap[..., rows] = inside[..., 0] - mean
        return shown

    def _seen_by_order(self, causal: bool) -> None:
        """Sets who sees a key by the causal order alone: without logits, an attention of 0 may be of a seen key."""
        for target, queries in ((self.seen_by, self.queries), (self.early_seen_by, EARLY)):
            if target is not None:
                steps = torch.arange(target.shape[-1], device=target.device)
                target.copy_(queries - steps if causal else steps.new_full((1,), queries))

    def finish(self) -> AttentionSums:
        seen, square = self.seen, self.queries == self.keys
        causal = square and not self.later
        whole = torch.arange(1, self.queries + 1, device=self.gap.device) if causal else self.keys
        sinks = seen.logits is not None and seen.logits.shape[-1] > self.keys
        distribution = seen.logits is not None or bool(((self.total - 1).abs() < NORMALISED).all())
        if square:
            self.previous[..., 0] = 0.0
        if seen.logits is None:
            self._seen_by_order(causal)
        return AttentionSums(
            first=self.first,
            diagonal=self.diagonal if square else None,
            previous=self.previous if square else None,
            entropy=self.entropy if distribution else torch.full_like(self.entropy, torch.nan),
            margin=self.margin,
            learned_sink=1 - self.total if sinks else torch.zeros_like(self.total),
            first_is_largest=self.largest,
            logit_gap=self.gap.masked_fill(self.visible != whole, torch.nan),
            columns=self.columns,
            early_columns=self.early,
            visible=self.visible,
            sees_first=self.sees_first,
            seen_by=self.seen_by,
            early_seen_by=self.early_seen_by,
            causal=causal,
            row_total=None if distribution else self.total,
        )
