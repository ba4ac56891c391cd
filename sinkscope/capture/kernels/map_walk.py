"""The sums of `walk`, taken from attention maps that the model's own code has formed.

A map is read in blocks of queries, one layer at a time, and not kept. Where passes over a cache go on with a sequence,
each forms the map of its own queries: what is taken of these is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.kernels.sums import EARLY, AttentionSums, block_edges
from sinkscope.capture.masks.visibility import FEW

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
        of_tokens: (B, Tq, H, dv), the output without what learned keys add that belong to no token; None where they add
            nothing.
    """

    probabilities: Tensor
    logits: Tensor | None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    of_tokens: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to sum in: float64 for a float64 map, else float32."""
        return torch.float64 if self.probabilities.dtype == torch.float64 else torch.float32

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk."""
        queries, keys = self.probabilities.shape[-2:]
        return queries, keys

    @property
    def squares(self) -> bool:
        """Whether it is known to weigh values by products of as many queries as keys."""
        queries, keys = self.lengths
        return queries == keys and self.query is not None and self.key is not None and self.value is not None

    @property
    def rounding(self) -> float:
        """How far rounding may move a probability, or the sum of a row."""
        given = [self.probabilities] if self.logits is None else [self.probabilities, self.logits]
        return max(1e-5, *(2 * torch.finfo(tensor.dtype).eps for tensor in given))

    def shares(self, rows: slice) -> Tensor:
        """The probabilities of these queries in `dtype`; those in half precision are recomputed from their logits."""
        if self.logits is None or self.logits.dtype in (torch.float32, torch.float64):
            return self.probabilities[:, :, rows].to(self.dtype)
        return self._softmax(rows)

    def is_softmax(self, rows: slice) -> bool:
        """Whether these queries' probabilities are the softmax of their logits, up to rounding."""
        if self.logits is None:
            return False
        given = self.probabilities[:, :, rows].to(self.dtype)
        return torch.allclose(given, self._softmax(rows), rtol=0.0, atol=self.rounding, equal_nan=True)

    def _softmax(self, rows: slice) -> Tensor:
        assert self.logits is not None
        return self.logits[:, :, rows].to(self.dtype).softmax(-1)[..., : self.probabilities.shape[-1]]


QUERIES = (
    *("first", "diagonal", "previous", "entropy", "total", "size", "sink", "margin", "gap", "largest", "visible"),
    *("sees_first", "sees_few"),
)
KEYS = ("columns", "seen_by")
EARLY_KEYS = ("early", "early_seen_by")
"""The tensors of MapRows by their last axis."""


@dataclass
class MapRows:
    """What is taken of the queries of a map: all of them, or those that a pass over a cache adds.

    The tensors up to `columns` are as in AttentionSums, but `gap` is there for every query; `total` and `size` are its
    sums of probabilities and of their absolute values, `sink` what learned sinks take of a row that is a distribution.
    `early`, `early_seen_by`: `columns` and `seen_by` of the first
    64 queries; None where the 64th is not among these. `later`: some query sees a later key. `logits`: the map is the
    softmax of known logits. `sinks`: these are more than the keys.
    """

    first: Tensor
    diagonal: Tensor
    previous: Tensor
    entropy: Tensor
    total: Tensor
    size: Tensor
    sink: Tensor
    margin: Tensor
    gap: Tensor
    largest: Tensor
    visible: Tensor
    sees_first: Tensor
    sees_few: Tensor
    columns: Tensor
    seen_by: Tensor
    early: Tensor | None
    early_seen_by: Tensor | None
    later: bool
    logits: bool
    sinks: bool

    @property
    def queries(self) -> int:
        """Tq."""
        return self.first.shape[-1]

    @property
    def keys(self) -> int:
        """Tk."""
        return self.columns.shape[-1]

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.queries == self.keys and not self.later

    def changed(self, change: Callable[[Tensor], Tensor], names: Sequence[str] | None = None) -> MapRows:
        """The same with every tensor changed, or those of these names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        changes: dict[str, Any] = {name: change(kept[name]) for name in kept if names is None or name in names}
        return replace(self, **changes)

    def row(self, index: int) -> MapRows:
        """One sequence of the batch."""
        return self.changed(lambda tensor: tensor[index : index + 1])

    def weighed(self, sequences: Tensor) -> MapRows:
        """The same with 0 in the sums over queries of the sequences [B] that are False."""
        return self.changed(lambda sums: sums * sequences[:, None, None].to(sums.device), (*KEYS, *EARLY_KEYS))

    def begun(self, queries: int, keys: int) -> MapRows:
        """The same of a sequence that ends after so many queries, which see the first keys, so many. No later query is
        in its `columns`."""
        if queries >= self.queries:
            return self
        cut = self.changed(lambda tensor: tensor[..., :queries], QUERIES)
        cut = cut.changed(lambda tensor: tensor[..., :keys], KEYS)
        return cut if queries >= EARLY else replace(cut, early=None, early_seen_by=None)

    def sums(self) -> AttentionSums:
        """The sums of all queries. logit_gap is NaN for a query that does not see all keys that its causal order
        allows, because the logits of masked keys are lost."""
        square, causal = self.queries == self.keys, self.causal
        whole = torch.arange(1, self.queries + 1, device=self.gap.device) if causal else self.keys
        distribution = self.logits or bool(((self.total - 1).abs() < NORMALISED).all())
        previous = self.previous.clone()
        previous[..., 0] = 0.0
        seen_by, early_seen_by = self.seen_by, self.early_seen_by
        if not self.logits:  # an attention of 0 may be of a seen key: the causal order alone tells
            seen_by = self._by_order(seen_by, self.queries)
            early_seen_by = None if early_seen_by is None else self._by_order(early_seen_by, EARLY)
        return AttentionSums(
            first=self.first,
            diagonal=self.diagonal if square else None,
            previous=previous if square else None,
            entropy=self.entropy if distribution else torch.full_like(self.entropy, torch.nan),
            margin=self.margin,
            learned_sink=self.sink if distribution else torch.full_like(self.sink, torch.nan),
            first_is_largest=self.largest,
            logit_gap=self.gap.masked_fill(self.visible != whole, torch.nan),
            columns=self.columns,
            early_columns=self.early,
            visible=self.visible,
            sees_first=self.sees_first,
            sees_few=self.sees_few,
            seen_by=seen_by,
            early_seen_by=early_seen_by,
            causal=causal,
            row_total=None if distribution and not self.sinks else self.size,
            signed_total=None if torch.equal(self.total, self.size) else self.total,
        )

    def _by_order(self, seen_by: Tensor, queries: int) -> Tensor:
        """Who of so many queries sees each key by the causal order, or where there is none."""
        steps = torch.arange(seen_by.shape[-1], device=seen_by.device)
        return (queries - steps if self.causal else steps.new_full((1,), queries)).expand_as(seen_by)


def following(passes: Sequence[MapRows]) -> MapRows:
    """The queries of passes over one cache, in their order, as one map would give them. Each sees as many keys as the
    pass before it, or more."""
    if len(passes) == 1:
        return passes[0]
    tensors: dict[str, Any] = {name: torch.cat([getattr(rows, name) for rows in passes], -1) for name in QUERIES}
    for name, early in zip(KEYS, EARLY_KEYS, strict=True):
        tensors[early], so_far = None, getattr(passes[0], name)[..., :0]
        for rows in passes:
            begun = getattr(rows, early)
            if begun is not None:
                tensors[early] = begun + _padded(so_far, begun.shape[-1])
            so_far = getattr(rows, name) + _padded(so_far, rows.keys)
        tensors[name] = so_far
    return MapRows(
        **tensors, later=any(rows.later for rows in passes), logits=all(rows.logits for rows in passes),
        sinks=any(rows.sinks for rows in passes),
    )  # fmt: skip


def _padded(tensor: Tensor, keys: int) -> Tensor:
    """The sums of the first keys, so many: 0 for those that no query has seen yet."""
    return torch.nn.functional.pad(tensor, (0, keys - tensor.shape[-1]))


def shown_keys(logits: Tensor) -> Tensor:
    """Which keys each query sees, from the logits of its row."""
    return logits > logits.amax(-1, keepdim=True) - HIDDEN_GAP


def map_sums(seen: AttentionMap, block_bytes: int | None = None) -> AttentionSums:
    """AttentionSums from a map. Probabilities in half precision are recomputed from their logits.

    logit_gap is NaN for a query that does not see all keys that its causal order allows, because the logits of masked
    keys are lost. Without logits, margin and logit_gap are NaN and a probability of 0 counts as masked. Logits whose
    softmax is not the map are left out: the model wrote into one of the two, or cut the map's first keys off.
    """
    return map_rows(seen, block_bytes=block_bytes).sums()


def map_rows(seen: AttentionMap, before: int = 0, block_bytes: int | None = None) -> MapRows:
    """What is taken of a map. `before`: the queries of passes before it, over the same cache."""
    batch, heads, queries, keys = seen.probabilities.shape
    row_bytes, device = 2 * batch * heads * keys * 4, seen.probabilities.device
    edges = block_edges(queries, row_bytes, device, block_bytes, EARLY - before)
    if not all(seen.is_softmax(slice(*edge)) for edge in edges):
        seen = replace(seen, logits=None)
    walk = _MapWalk(seen, before)
    for start, stop in edges:
        walk.block(start, stop)
    return walk.rows


class _MapWalk:
    def __init__(self, seen: AttentionMap, before: int) -> None:
        self.seen, self.before = seen, before
        batch, heads, queries, keys = seen.probabilities.shape

        def rows() -> Tensor:
            return torch.full((batch, heads, queries), torch.nan, dtype=seen.dtype, device=seen.probabilities.device)

        first = rows()
        largest = torch.zeros_like(first, dtype=torch.bool)
        visible = torch.zeros_like(first, dtype=torch.long)
        logits = seen.logits is not None
        self.rows = MapRows(
            first=first, diagonal=rows(), previous=rows(), entropy=rows(), total=rows(), size=rows(), sink=rows(),
            margin=rows(), gap=rows(), largest=largest, visible=visible, sees_first=torch.zeros_like(largest),
            sees_few=torch.zeros_like(visible),
            columns=first.new_zeros(batch, heads, keys), seen_by=visible.new_zeros(batch, heads, keys),
            early=None, early_seen_by=None, later=False, logits=logits,
            sinks=seen.logits is not None and seen.logits.shape[-1] > keys,
        )  # fmt: skip

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum."""
        taken, rows = self.rows, slice(start, stop)
        shares = self.seen.shares(rows)
        taken.total[..., rows] = shares.sum(-1)
        if self.seen.logits is None:
            shown = shares != 0  # heads mixed behind the softmax may have negative weights
            peak = shares.amax(-1)
            taken.largest[..., rows] = (shares[..., 0] >= peak) & shown[..., 0]
            whole = (taken.total[..., rows] - 1).abs() <= self.seen.rounding
            taken.sink[..., rows] = torch.where(whole, 0.0, torch.nan)  # a sink may have taken what is missing
        else:
            shown = self._from_logits(rows, self.seen.logits[:, :, rows].to(self.seen.dtype))
        taken.visible[..., rows] = shown.sum(-1)
        taken.sees_first[..., rows] = shown[..., 0]
        taken.sees_few[..., rows] = shown[..., :FEW].sum(-1)
        own = start + self.before
        taken.later |= bool(shown.triu(own + 1).any())
        taken.seen_by += shown.sum(-2)
        taken.first[..., rows] = shares[..., 0]
        taken.entropy[..., rows] = torch.special.entr(shares).sum(-1)
        taken.size[..., rows] = shares.abs().sum(-1)
        taken.columns += shares.sum(-2)
        if stop + self.before == EARLY:
            taken.early = taken.columns[..., :EARLY].clone()
            taken.early_seen_by = taken.seen_by[..., :EARLY].clone()
        diagonal, previous = shares.diagonal(own, -2, -1), shares.diagonal(own - 1, -2, -1)
        taken.diagonal[..., start : start + diagonal.shape[-1]] = diagonal
        skip = 1 if own == 0 else 0
        taken.previous[..., start + skip : start + skip + previous.shape[-1]] = previous

    def _from_logits(self, rows: slice, logits: Tensor) -> Tensor:
        """Fills margin, sink, gap and largest for a block of queries; returns which keys each query sees."""
        taken = self.rows
        shown = shown_keys(logits)
        kept = logits.masked_fill(~shown, -torch.inf)
        margin = kept[..., 0] - kept[..., 1:].logsumexp(-1)
        taken.margin[..., rows] = margin.masked_fill(~margin.isfinite(), torch.nan)
        taken.sink[..., rows] = 0.0
        if taken.sinks:  # one minus the sum over the keys would cancel where they take nearly the whole row
            taken.sink[..., rows] = (kept[..., taken.keys :].logsumexp(-1) - kept.logsumexp(-1)).exp()
        shown = shown[..., : taken.keys]
        inside = logits[..., : taken.keys]
        taken.largest[..., rows] = (inside[..., 0] >= inside.amax(-1)) & shown[..., 0]
        mean = inside.masked_fill(~shown, 0.0).sum(-1) / shown.sum(-1)
        taken.gap[..., rows] = inside[..., 0] - mean
        return shown
