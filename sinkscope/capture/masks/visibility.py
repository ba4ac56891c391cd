"""Which keys each query may see, and what is added to its logits, read from any mask that transformers passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.capture.masks.lazy import LazyMask

FEW = 4
"""Xiao et al. 2309.17453 find that four first tokens serve as sinks, so it is kept which of them a query sees."""

ROWS = 128
"""Mask rows read at a time, so that no temporary is as large as the mask."""


@dataclass(frozen=True)
class BlockMask:
    """The mask of a block of queries: keys `low..high` contain every key that one of them may see.

    `ragged` lists the column ranges (counted from `low`) in which some query does not see some key, each with its
    hidden entries. Under a causal order or a window most blocks need one or two narrow ranges, not the whole block.
    """

    low: int
    high: int
    ragged: tuple[tuple[slice, Bool[Tensor, "b h rows _"]], ...]
    bias: Float[Tensor, "b h rows keys"] | None

    @property
    def hidden(self) -> Bool[Tensor, "b h rows _"] | None:
        """The hidden entries of all columns as one tensor; None where every query sees every key."""
        if not self.ragged:
            return None
        columns, first = self.ragged[0]
        width = self.high - self.low
        if len(self.ragged) == 1 and columns == slice(0, width):
            return first
        whole = first.new_zeros(*first.shape[:-1], width)
        for columns, piece in self.ragged:
            whole[..., columns] = piece
        return whole


@dataclass(frozen=True)
class Visibility:
    """The keys that each query may see under one mask. O(T) memory where every query's keys are contiguous.

    Attributes:
        causal: no query sees a later key (decided by the mask's contents, not by the model's class).
        counts: the number of keys that query i may see, without learned sinks. Shape (b, h, query), where b and h are 1
            if the batch or the heads share the mask.
        sees_first: whether query i may see key 0, shaped like counts.
        sees_few: the number of the keys 0..3 that query i may see, shaped like counts.
        keys: the number of keys.
        spans: the first key of every query and the one after its last, each shaped like counts. Set where every query's
            keys are contiguous and no bias is added: causal order, windows, chunks, padding, packed rows. A query that
            sees nothing has (keys, 0). None otherwise.
        mask: the mask itself where spans is None: it adds a bias, or a query's keys have gaps.
        reach: for each query, over b and h: smallest and largest first key, smallest and largest end (the key after the
            last). Shape (4, query).
        has_empty_rows: some query sees no key at all (padding); its attention is 0, as in torch's sdpa.
        has_bias: the mask adds finite terms to the logits (ALiBi, relative positions).
        alike: every sequence's own mask has the same `causal` and `has_bias`. `causal` is False where they differ.
    """

    causal: bool
    counts: Int[Tensor, "b h query"]
    sees_first: Bool[Tensor, "b h query"]
    sees_few: Int[Tensor, "b h query"]
    keys: int
    spans: tuple[Int[Tensor, "b h query"], Int[Tensor, "b h query"]] | None
    mask: Tensor | None
    reach: Int[Tensor, "4 query"]
    has_empty_rows: bool = False
    has_bias: bool = False
    alike: bool = True
    of_mask: dict[Any, Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """See AttentionSums."""
    _by_first: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def seen_by(self) -> Int[Tensor, "b h key"]:
        """The number of queries that may see each key."""
        return self._seen_by(self.counts.shape[-1], self.keys)

    @cached_property
    def sequences(self) -> list[Visibility]:
        """That of each sequence by itself; of one, where all share the mask."""
        queries, rows = self.counts.shape[-1], [slice(row, row + 1) for row in range(len(self.counts))]
        if self.spans is not None:
            first, past = self.spans
            return [from_spans(first[row], past[row], self.keys) for row in rows]
        assert self.mask is not None
        return [_scan_rows(self.mask[row], queries, self.keys) for row in rows]

    @cached_property
    def whole(self) -> bool:
        """Whether every query sees every key, and nothing is added to a logit."""
        return self.spans is not None and bool((self.counts == self.keys).all())

    @cached_property
    def triangle(self) -> bool:
        """Whether query i sees keys 0..i, and nothing is added to a logit."""
        steps = torch.arange(1, self.counts.shape[-1] + 1, device=self.counts.device)
        return self.spans is not None and self.causal and bool((self.counts == steps).all())

    @cached_property
    def _reach_on_host(self) -> Tensor:
        return self.reach.cpu()

    def seen_by_first(self, queries: int) -> Int[Tensor, "b h some"] | None:
        """`seen_by` among the first `queries`, for as many keys; None where there are fewer queries."""
        if self.counts.shape[-1] < queries:
            return None
        if queries not in self._by_first:
            self._by_first[queries] = self._seen_by(queries, min(queries, self.keys))
        return self._by_first[queries]

    def _seen_by(self, queries: int, keys: int) -> Tensor:
        if self.spans is None:
            assert self.mask is not None
            strips = (strip(self.mask, start, min(start + ROWS, queries), 0, keys) for start in range(0, queries, ROWS))
            return sum((_seen(rows).sum(-2) for rows in strips), self.counts.new_zeros(*self.counts.shape[:2], keys))
        first, past = (edge[..., :queries].clamp(max=keys) for edge in self.spans)
        sees = (past > first).to(self.counts.dtype)
        change = self.counts.new_zeros(*self.counts.shape[:2], keys + 1)
        change.scatter_add_(-1, first, sees).scatter_add_(-1, past, -sees)
        return change.cumsum(-1)[..., :keys]

    def seen(self, start: int, stop: int) -> Bool[Tensor, "b h rows key"]:
        """Which keys queries start..stop may see."""
        if self.spans is None:
            assert self.mask is not None
            return _seen(strip(self.mask, start, stop, 0, self.keys))
        first, past = (edge[..., start:stop, None] for edge in self.spans)
        columns = torch.arange(self.keys, device=first.device)
        return (columns >= first) & (columns < past)

    @property
    def chosen(self) -> bool:
        """Whether some query does not see a key between its first and its last that another query sees: a model chose
        keys for each, as DeepSeek-V3.2 does. Padding is the same for all queries of a sequence."""
        if self.spans is not None:
            return False
        queries, some = self.counts.shape[-1], self.seen_by[..., None, :] > 0
        for start in range(0, queries, ROWS):
            seen = self.seen(start, min(start + ROWS, queries))
            begun, left = seen.cumsum(-1) > 0, seen.flip(-1).cumsum(-1).flip(-1) > 0
            if bool((begun & left & some & ~seen).any()):
                return True
        return False

    def block(self, start: int, stop: int, whole: bool = False) -> BlockMask:
        """The mask of queries start..stop over the keys that they may see. `whole` also includes keys that a window
        hides from all of these queries."""
        first, last_first, first_past, past = self._edges(start, stop)
        low, high = (0, stop if self.causal else self.keys) if whole else (first, past)
        if high <= low:  # no query of the block sees a key: the block gets one key, which is hidden
            low, high = 0, 1
        if self.spans is not None:
            return BlockMask(low, high, self._ragged(start, stop, low, high, last_first, first_past), None)
        assert self.mask is not None
        rows = strip(self.mask, start, stop, low, high)
        hidden = ~rows if rows.dtype == torch.bool else _hidden(rows)
        bias = rows.float().masked_fill(hidden, 0.0) if self.has_bias else None
        return BlockMask(low, high, ((slice(0, high - low), hidden),), bias)

    def _edges(self, start: int, stop: int) -> list[int]:
        """Smallest and largest first key, smallest and largest end of queries start..stop."""
        rows = self._reach_on_host[:, start:stop]
        least, most = rows.amin(1).tolist(), rows.amax(1).tolist()
        return [least[0], most[1], least[2], most[3]]

    def _ragged(
        self, start: int, stop: int, low: int, high: int, last_first: int, first_past: int
    ) -> tuple[tuple[slice, Tensor], ...]:
        """The column ranges in which queries differ. All queries see the keys from the largest first key up to the
        smallest end, so only the columns on either side of these need a mask."""
        assert self.spans is not None
        first, past = (edge[..., start:stop, None] for edge in self.spans)
        columns = torch.arange(low, high, device=first.device)
        if last_first >= first_past:
            return ((slice(0, high - low), (columns < first) | (columns >= past)),)
        pieces = []
        if last_first > low:
            left = slice(0, last_first - low)
            pieces.append((left, columns[left] < first))
        if first_past < high:
            right = slice(first_past - low, high - low)
            pieces.append((right, columns[right] >= past))
        return tuple(pieces)


def read_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Visibility:
    """Reads a mask as transformers passes it: None (then `causal` decides), bool (True = attend) or additive float.

    Its shape is (b | 1, h | 1, query | 1, >= keys). Raises ValueError where it does not fit the queries and keys.
    """
    if mask is None:
        steps = torch.arange(1, queries + 1, device=device).view(1, 1, -1)
        past = steps.clamp(max=keys) if causal else torch.full_like(steps, keys)
        return from_spans(torch.zeros_like(past), past, keys)
    if mask.dim() != 4 or mask.shape[-2] not in (1, queries) or mask.shape[-1] < keys:
        raise ValueError(f"an attention mask of shape {tuple(mask.shape)} for {queries} queries and {keys} keys")
    mask = mask[..., :keys]
    if isinstance(mask, LazyMask) and mask.shape[-2] != queries:
        mask = mask.whole()  # it has one row for all queries, so it cannot be read in strips of rows
    if not isinstance(mask, LazyMask):
        mask = mask.expand(-1, -1, queries, keys)
        # A mask that is only expanded over the batch or the heads is read once.
        mask = mask[:1] if mask.stride(0) == 0 else mask
        mask = mask[:, :1] if mask.stride(1) == 0 else mask
    return _scan_rows(mask, queries, keys)


def strip(mask: Tensor, start: int, stop: int, low: int, high: int) -> Tensor:
    """Queries start..stop and keys low..high of a mask; a LazyMask makes them now."""
    if isinstance(mask, LazyMask):
        return mask.strip(start, stop, low, high)
    return mask[..., start:stop, low:high]


def _scan_rows(mask: Tensor, queries: int, keys: int) -> Visibility:
    bias = torch.zeros(len(strip(mask, 0, 1, 0, 1)), dtype=torch.bool, device=mask.device)
    columns = torch.arange(1, keys + 1, device=mask.device, dtype=torch.int32)
    # Results are written into one tensor allocated first: small results kept one by one would keep the allocator from
    # returning each strip's memory.
    results = torch.empty(4, *strip(mask, 0, 1, 0, 1).shape[:2], queries, dtype=torch.int64, device=mask.device)
    total, few, starts, ends = results
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        rows = strip(mask, start, stop, 0, keys)
        seen = _seen(rows)
        total[..., start:stop] = seen.sum(-1)
        few[..., start:stop] = seen[..., :FEW].sum(-1)
        ends[..., start:stop] = torch.where(seen, columns, 0).amax(-1)
        starts[..., start:stop] = torch.where(seen, columns, keys + 1).amin(-1) - 1
        if rows.dtype != torch.bool:
            bias |= ((rows != 0) & seen).flatten(1).any(1)
    has_bias = bool(bias.any())
    side_by_side = bool(((ends - starts).clamp(min=0) == total).all())
    if side_by_side and not has_bias:
        return from_spans(starts, ends, keys)
    reach = _reach(starts, ends)
    return Visibility(
        causal=_is_causal(reach, keys),
        counts=total,
        sees_first=starts == 0,
        sees_few=few,
        keys=keys,
        spans=None,
        mask=mask,
        reach=reach,
        has_empty_rows=bool((total == 0).any()),
        has_bias=has_bias,
        alike=_alike(bias) and _alike_in_order(ends, keys),
    )


def from_spans(first: Tensor, past: Tensor, keys: int) -> Visibility:
    """The visibility of queries that each see the keys `first` to before `past`, (b, h, query)."""
    counts, reach = (past - first).clamp(min=0), _reach(first, past)
    sees_first, sees_few = (first == 0) & (past > 0), (past.clamp(max=FEW) - first).clamp(min=0)
    empty = bool((counts == 0).any())
    return Visibility(
        _is_causal(reach, keys), counts, sees_first, sees_few, keys, (first, past), None, reach, empty,
        alike=_alike_in_order(past, keys),
    )  # fmt: skip


def _reach(first: Tensor, past: Tensor) -> Tensor:
    """Visibility's `reach`, on the CPU because single numbers are read from it for every block."""
    pairs = [edge for tensor in (first, past) for edge in (tensor.amin((0, 1)), tensor.amax((0, 1)))]
    return torch.stack(pairs).cpu()


def _is_causal(reach: Tensor, keys: int) -> bool:
    queries = reach.shape[1]
    return queries == keys and not bool((reach[3] > torch.arange(1, queries + 1)).any())


def _alike_in_order(past: Tensor, keys: int) -> bool:
    """Whether queries that see the keys to before `past`, (b, h, query), are causal in all sequences or in none."""
    queries = past.shape[2]
    if queries != keys or len(past) == 1:
        return True
    return _alike((past.amax(1) > torch.arange(1, queries + 1, device=past.device)).any(1))


def _alike(told: Tensor) -> bool:
    """Whether [B] holds one value alone."""
    return len(told) == 1 or bool((told == told[0]).all())


def _seen(rows: Tensor) -> Tensor:
    """Which keys the rows of a mask let their queries see."""
    return rows if rows.dtype == torch.bool else ~_hidden(rows)


def _hidden(rows: Tensor) -> Tensor:
    """Where an additive mask hides a key: at half of the dtype's most negative number or lower, or -inf.

    ALiBi and relative position biases stay far above that bound in every dtype; float16 masks use -65504.
    """
    return rows <= torch.finfo(rows.dtype).min / 2
