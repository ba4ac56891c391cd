"""One attention call, walked over in blocks of queries: its output and every row and column sum, never T x T.

Sums are float32 whatever the model's dtype (float64 for a float64 model). Keys and values of a group are used where
they lie, not repeated for each query head. METRICS' notation: A[i, j] is the probability query i gives key j, after
mask, soft-cap, window and learned sink.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.capture.masks import BlockMask, Visibility
from sinkscope.errors import SinkscopeError

EARLY = 64
"""Gu et al. 2410.10781 measure sinks at T = 64: columns are also kept as they stood after query 63."""

FLOOR = -1e30
"""A masked logit: finite, so that 0 * FLOOR is 0 and not NaN, and exp(FLOOR - max) is exactly 0."""

BLOCK_BYTES = 4 * 2**20
"""Logits held at once on a CPU: about the cores' own caches (0.5 to 16 MiB tried; 2 to 8 are alike)."""

DEVICE_BLOCK_BYTES = 256 * 2**20
"""The same on an accelerator, where large launches pay."""

UNDERFLOW = 1e-30


@dataclass(frozen=True)
class AttentionCall:
    """One call as transformers makes it, with every keyword resolved.

    Shapes: query (B, H, Tq, d), key (B, G, Tk, d), value (B, G, Tk, dv); H is a multiple of G.
    `sinks` are extra logits of the denominator, (B | 1, H, Tq | 1, n). `bias` is added to the logits, (b, h, Tq, Tk).
    `score` names a walk of WALKS: softmax, or a score whose rows are no distribution (see `capture.unnormalised`).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Visibility
    scaling: float
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    score: str = "softmax"

    @property
    def square(self) -> bool:
        """Queries and keys are the same positions (self-attention)."""
        return self.query.shape[2] == self.key.shape[2]

    @property
    def linear(self) -> bool:
        """Logits are plain scaled dot products, so that their means need no logits."""
        return self.softcap is None and self.bias is None and not self.visible.has_bias


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


def attend(call: AttentionCall, block_bytes: int | None = None) -> tuple[Tensor, AttentionSums]:
    """Attention output (B, Tq, H, dv) in the query's dtype, and the sums over its probabilities.

    Memory: O(B H rows Tk) with as many rows as `block_bytes` allows. Equal to softmax attention within float32
    rounding; a query that sees no key returns 0.
    """
    if call.score not in WALKS:
        raise SinkscopeError(f"the model asks for an unknown attention score {call.score!r}: one of {', '.join(WALKS)}")
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    walk = WALKS[call.score](call, batch, groups, heads // groups, queries, keys)
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if call.query.device.type == "cpu" else DEVICE_BLOCK_BYTES
    for start, stop in block_edges(queries, batch * heads * keys * 4, block_bytes):
        walk.block(start, stop)
    return walk.finish()


def block_edges(queries: int, row_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cuts 0..queries into blocks of a multiple of 16 rows, with an edge at EARLY where there are as many queries."""
    rows = max(16, block_bytes // row_bytes // 16 * 16)
    edges = sorted({*range(0, queries, rows), *((EARLY,) if queries > EARLY else ()), queries})
    return list(itertools.pairwise(edges))


class Walk:
    """The running sums of one call. Arrays are (B, G, R, ...) with R query heads a group: head = g * R + r."""

    def __init__(self, call: AttentionCall, batch: int, groups: int, repeat: int, queries: int, keys: int) -> None:
        self.call, self.shape = call, (batch, groups, repeat)
        self.queries, self.keys = queries, keys
        self.dtype = _sum_dtype(call)
        key, value = call.key.to(self.dtype), call.value.to(self.dtype)
        self.key_rows = key.reshape(batch * groups, keys, -1).mT
        self.value_rows = value.reshape(batch * groups, keys, -1)
        self.query = call.query.reshape(batch, groups, repeat, queries, -1)
        self.sinks = None
        if call.sinks is not None:
            sinks = call.sinks.to(self.dtype)
            self.sinks = sinks.expand(-1, -1, queries, -1).unflatten(1, (groups, repeat))

        def rows() -> Tensor:
            return torch.zeros(batch, groups, repeat, queries, dtype=self.dtype, device=call.query.device)

        self.first, self.entropy, self.margin, self.learned, self.gap = rows(), rows(), rows(), rows(), rows()
        self.diagonal, self.previous = rows(), rows()
        self.largest = torch.zeros(batch, groups, repeat, queries, dtype=torch.bool, device=call.query.device)
        self.columns = torch.zeros(batch, groups, repeat, keys, dtype=self.dtype, device=call.query.device)
        self.early: Tensor | None = None
        self.out = torch.empty(
            batch, queries, groups, repeat, value.shape[-1], dtype=call.query.dtype, device=call.query.device
        )
        self.buffers: tuple[Tensor, Tensor] | None = None

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum, and writes their output."""
        seen = self.call.visible.block(start, stop, whole=not self.call.linear)
        rows = slice(start, stop)
        logits = self._logits(start, stop, seen)
        if not self.call.linear:
            self.gap[..., rows] = self._row_gap(logits, seen, start)
        hidden = None if seen.hidden is None else grouped(seen.hidden, self.shape)
        if hidden is not None:
            logits.masked_fill_(hidden, FLOOR)
        reaches_first = seen.low == 0 and logits.shape[-1] > 0
        peak = logits.amax(-1, keepdim=True)
        if reaches_first:
            self.largest[..., rows] = (logits[..., 0] >= peak[..., 0]) & (logits[..., 0] > FLOOR)
        sink_logits = None if self.sinks is None else self.sinks[..., rows, :]
        if sink_logits is not None:
            peak = torch.maximum(peak, sink_logits.amax(-1, keepdim=True))
        logits.sub_(peak)
        weights = torch.exp(logits, out=self._buffer(1, logits.shape))
        if hidden is not None and self.call.visible.has_empty_rows:
            weights.masked_fill_(hidden, 0.0)
        taken = 0.0 if sink_logits is None else torch.exp(sink_logits - peak).sum(-1)
        rest = weights[..., 1:].sum(-1) + taken if reaches_first else weights.sum(-1) + taken
        norm = rest + weights[..., 0] if reaches_first else rest
        if self.call.visible.has_empty_rows:
            norm = norm.masked_fill(norm == 0, 1.0)
        self._row_sums(rows, weights, logits, norm, taken)
        if reaches_first:
            self.first[..., rows] = weights[..., 0] / norm
            exps = logits if sink_logits is None else torch.cat([logits, sink_logits - peak], -1)
            self.margin[..., rows] = _margin(exps, rest)
        else:
            self.margin[..., rows] = torch.nan
        self._column_sums(seen, weights, norm, stop)
        self._output(rows, seen, weights, norm)

    def _logits(self, start: int, stop: int, seen: BlockMask) -> Tensor:
        batch, groups, repeat = self.shape
        count, width = stop - start, seen.high - seen.low
        query = self.query[..., start:stop, :].to(self.dtype) * self.call.scaling
        query = query.reshape(batch * groups, repeat * count, -1)
        shape = (batch, groups, repeat, count, width)
        logits = self._buffer(0, shape)
        keys = self.key_rows[..., seen.low : seen.high]
        torch.bmm(query, keys, out=logits.view(batch * groups, repeat * count, width))
        if self.call.softcap is not None:
            logits.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
        for bias in (seen.bias, self._bias_rows(start, stop, seen)):
            if bias is not None:
                logits.add_(grouped(bias, self.shape))
        return logits

    def _bias_rows(self, start: int, stop: int, seen: BlockMask) -> Tensor | None:
        if self.call.bias is None:
            return None
        bias = self.call.bias.expand(-1, -1, self.queries, -1)
        return bias[..., start:stop, seen.low : seen.high].to(self.dtype).clamp(min=FLOOR)

    def _row_gap(self, logits: Tensor, seen: BlockMask, start: int) -> Tensor:
        """s_i0 - mean_j s_ij where a soft-cap or bias makes the mean depend on every logit."""
        hidden = seen.hidden if seen.bias is not None else None
        if self.call.visible.causal and seen.bias is None:
            rows = torch.arange(start, start + logits.shape[-2], device=logits.device)
            hidden = (torch.arange(logits.shape[-1], device=logits.device) > rows[:, None])[None, None]
        if hidden is None:
            return logits[..., 0] - logits.mean(-1)
        kept = ~grouped(hidden, self.shape)
        return logits[..., 0] - (logits * kept).sum(-1) / kept.sum(-1).clamp(min=1)

    def _row_sums(self, rows: slice, weights: Tensor, logits: Tensor, norm: Tensor, taken: Tensor | float) -> None:
        share = taken / norm
        self.learned[..., rows] = share
        log_norm = norm.log()
        self.entropy[..., rows] = log_norm * (1 - share) - _dot(weights, logits) / norm

    def _column_sums(self, seen: BlockMask, weights: Tensor, norm: Tensor, stop: int) -> None:
        start = stop - weights.shape[-2]
        inverse = norm.reciprocal()
        summed = (inverse.unsqueeze(-2).flatten(0, 2) @ weights.flatten(0, 2)).view(*self.shape, -1)
        self.columns[..., seen.low : seen.high] += summed
        if stop == EARLY:
            self.early = self.columns[..., :EARLY].clone()
        if self.call.square:
            offset = start - seen.low
            own = weights.diagonal(offset, -2, -1)
            self.diagonal[..., start : start + own.shape[-1]] = own * inverse[..., : own.shape[-1]]
            before = weights.diagonal(offset - 1, -2, -1)
            skip = 1 if offset == 0 else 0
            span = slice(start + skip, start + skip + before.shape[-1])
            self.previous[..., span] = before * inverse[..., skip : skip + before.shape[-1]]

    def _output(self, rows: slice, seen: BlockMask, weights: Tensor, norm: Tensor) -> None:
        batch, groups, repeat = self.shape
        count = weights.shape[-2]
        mixed = torch.bmm(
            weights.view(batch * groups, repeat * count, -1), self.value_rows[:, seen.low : seen.high]
        ).view(batch, groups, repeat, count, -1)
        mixed /= norm.unsqueeze(-1)
        self.out[:, rows] = mixed.permute(0, 3, 1, 2, 4)

    def _buffer(self, which: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Two scratch areas, as large as the largest block so far, used again for each block."""
        size = math.prod(shape)
        if self.buffers is None or self.buffers[0].numel() < size:
            device = self.call.query.device
            area = partial(torch.empty, size, dtype=self.dtype, device=device)
            self.buffers = (area(), area())
        return self.buffers[which][:size].view(shape)

    def finish(self) -> tuple[Tensor, AttentionSums]:
        def heads(values: Tensor) -> Tensor:
            return values.flatten(1, 2)

        call = self.call
        gap = heads(self.gap) if not call.linear else _linear_gap(call)
        sums = AttentionSums(
            first=heads(self.first),
            diagonal=heads(self.diagonal) if call.square else None,
            previous=heads(self.previous) if call.square else None,
            entropy=heads(self.entropy),
            margin=heads(self.margin),
            learned_sink=heads(self.learned),
            first_is_largest=heads(self.largest),
            logit_gap=gap,
            columns=heads(self.columns),
            early_columns=None if self.early is None else heads(self.early),
            visible=call.visible.counts,
            causal=call.visible.causal,
        )
        return self.out.flatten(2, 3), sums


WALKS: dict[str, Callable[..., Walk]] = {"softmax": Walk}
"""How a call's `score` is walked over; `capture.unnormalised` adds those that are no softmax."""


def _sum_dtype(call: AttentionCall) -> torch.dtype:
    return torch.float64 if call.query.dtype == torch.float64 else torch.float32


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.vecdot(left, right)


def _margin(exponents: Tensor, rest: Tensor) -> Tensor:
    """log(A[i,0] / (1 - A[i,0])) from shifted logits (key 0 first) and the summed exponentials of all others.

    Where those underflow (margins past about 69 nats) they are summed again from their own largest.
    """
    margin = exponents[..., 0] - rest.log()
    lost = rest < UNDERFLOW
    if lost.any():
        rows = exponents[lost]
        margin[lost] = rows[:, 0] - rows[:, 1:].logsumexp(-1)
    undefined = (exponents[..., 0] < FLOOR / 2) | (margin > -FLOOR / 2)
    return margin.masked_fill_(undefined, torch.nan)


def _linear_gap(call: AttentionCall) -> Tensor:
    """s_i0 - mean_j s_ij for plain scaled dot products: the mean of logits is the logit of the mean key."""
    batch, heads, queries, width = call.query.shape
    groups = call.key.shape[1]
    key = wide(call.key)
    if call.visible.causal and call.square:
        steps = torch.arange(1, queries + 1, device=key.device, dtype=key.dtype)
        mean = key.cumsum(2) / steps[:, None]
    else:
        mean = key.mean(2, keepdim=True)
    direction = (key[:, :, :1] - mean).unsqueeze(2)
    query = call.query.reshape(batch, groups, heads // groups, queries, width)
    return torch.einsum("bgxtd,bgytd->bgxt", wide(query), direction).flatten(1, 2).to(_sum_dtype(call)) * call.scaling


def wide(tensor: Tensor) -> Tensor:
    """Float64 where the device has it (Apple's GPUs do not): for sums whose terms nearly cancel."""
    return tensor.double() if tensor.device.type != "mps" else tensor.float()


def grouped(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(b | 1, h | 1, rows, keys) -> (b | 1, G | 1, R | 1, rows, keys), ready to meet the logits."""
    _, groups, repeat = shape
    if tensor.shape[1] == 1:
        return tensor.unsqueeze(2)
    return tensor.unflatten(1, (groups, repeat))
