"""Computes one attention call in blocks of queries: its output and every row and column sum, never T x T.

Sums are float32 whatever the model's dtype (float64 for a float64 model). The keys and values of a group are shared,
not repeated for each of its query heads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import BLOCK_BYTES, EARLY, AttentionSums, running_sum
from sinkscope.capture.masks.visibility import BlockMask
from sinkscope.capture.precision import as_widest
from sinkscope.capture.scores import Score, score_of
from sinkscope.errors import SinkscopeError

FLOOR = -1e30
"""The logit of a masked key: finite, so that 0 * FLOOR is 0 and not NaN, and exp(FLOOR - max) is exactly 0."""

UNDERFLOW = 1e-30

LEAST = {torch.float32: -87.0, torch.float64: -708.0}
"""The least logit, below its row's largest, whose exponential is a normal number. On a CPU, torch's exp (MKL's) takes
40 times as long below it, as for masked keys; so logits are raised to it, and the weights of masked keys set to 0."""

KEPT_BYTES = 4 * BLOCK_BYTES
"""The largest scratch area that is kept from one call to the next."""

_scratch = threading.local()


class Walk:
    """The running sums of one call. Tensors are (B, G, R, ...), with R query heads in a group: head = g * R + r.

    UNDERSTOOD: the fields of a call that it computes. Raises SinkscopeError for a call that sets another one: every
    other kernel leaves such a call to a walk, so nothing after it could.
    """

    UNDERSTOOD: ClassVar[frozenset[str]] = frozenset(
        {
            *("query", "key", "value", "mask", "causal", "scaling", "softcap", "bias", "bias_of_seen", "sinks"),
            *("window", "learned"),
        }
    )

    def __init__(self, call: AttentionCall, batch: int, groups: int, repeat: int, queries: int, keys: int) -> None:
        _check_fields(call, self.UNDERSTOOD)
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
        self.total = None if self.sinks is None else rows()
        self.largest = torch.zeros(batch, groups, repeat, queries, dtype=torch.bool, device=call.query.device)
        self.columns = torch.zeros(batch, groups, repeat, keys, dtype=self.dtype, device=call.query.device)
        self.early: Tensor | None = None
        self.out = torch.empty(
            batch, queries, groups, repeat, value.shape[-1], dtype=call.query.dtype, device=call.query.device
        )
        self.buffers: tuple[Tensor, Tensor] | None = None

    def block(self, start: int, stop: int) -> None:
        """Adds queries start..stop to every sum, and writes their output."""
        rows, seen, logits = self._begin(start, stop)
        self._hide(logits, seen, FLOOR)
        reaches_first = seen.low == 0 and logits.shape[-1] > 0
        peak = of_keys = logits.amax(-1, keepdim=True)
        if reaches_first:
            sees_first = logits[..., 0] > FLOOR
            self.largest[..., rows] = (logits[..., 0] >= peak[..., 0]) & sees_first
        sink_logits = None if self.sinks is None else self.sinks[..., rows, :]
        if sink_logits is not None:
            peak = torch.maximum(peak, sink_logits.amax(-1, keepdim=True))
        logits.sub_(peak)
        weights = torch.clamp(logits, min=LEAST[self.dtype], out=self._buffer(1, logits.shape)).exp_()
        self._hide(weights, seen, 0.0)
        if seen.bias is not None or self.call.bias is not None:
            weights.masked_fill_(logits < FLOOR / 2, 0.0)
        taken = 0.0 if sink_logits is None else torch.exp(sink_logits - peak).sum(-1)
        rest = weights[..., 1:].sum(-1) + taken if reaches_first else weights.sum(-1) + taken
        norm = rest + weights[..., 0] if reaches_first else rest
        if self.call.visible.has_empty_rows:
            norm = norm.masked_fill(norm == 0, 1.0)
        if self.total is not None:  # where all keys are at LEAST, their row is 0 to this precision
            below = (of_keys - peak)[..., 0] < LEAST[self.dtype]
            self.total[..., rows] = (weights.sum(-1) / norm).masked_fill_(below, 0.0)
        if reaches_first:
            self.first[..., rows] = weights[..., 0] / norm
            exps = logits if sink_logits is None else torch.cat([logits, sink_logits - peak], -1)
            self.margin[..., rows] = _margin(exps, rest).masked_fill_(~sees_first, torch.nan)
        else:
            self.margin[..., rows] = torch.nan
        self._row_sums(rows, weights, logits, norm, taken)
        self._column_sums(seen, weights, norm, stop)
        self._output(rows, seen, weights, norm)

    def _begin(self, start: int, stop: int) -> tuple[slice, BlockMask, Tensor]:
        """Returns the block's rows, its mask and its logits before the mask, whose gap it takes where one is asked."""
        seen = self.call.visible.block(start, stop, whole=not self.call.linear)
        rows = slice(start, stop)
        logits = self._logits(start, stop, seen)
        if not self.call.linear:
            self.gap[..., rows] = self._row_gap(logits, seen, start)
        return rows, seen, logits

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

    def _hide(self, tensor: Tensor, seen: BlockMask, value: float) -> None:
        for columns, hidden in seen.ragged:
            tensor[..., columns].masked_fill_(grouped(hidden, self.shape), value)

    def _bias_rows(self, start: int, stop: int, seen: BlockMask) -> Tensor | None:
        if self.call.bias is None:
            return None
        bias = self.call.bias.expand(-1, -1, self.queries, -1)
        return bias[..., start:stop, seen.low : seen.high].to(self.dtype).clamp(min=FLOOR)

    def _row_gap(self, logits: Tensor, seen: BlockMask, start: int) -> Tensor:
        """s_i0 - mean_j s_ij, averaged over the logits: with a soft-cap or bias the mean key is not enough."""
        hidden = seen.hidden if seen.bias is not None else None
        if self.call.visible.causal and seen.bias is None:
            rows = torch.arange(start, start + logits.shape[-2], device=logits.device)
            hidden = (torch.arange(logits.shape[-1], device=logits.device) > rows[:, None])[None, None]
        if hidden is None:
            return logits[..., 0] - logits.mean(-1)
        kept = ~grouped(hidden, self.shape)
        return logits[..., 0] - (logits * kept).sum(-1) / kept.sum(-1).clamp(min=1)

    def _row_sums(self, rows: slice, weights: Tensor, logits: Tensor, norm: Tensor, taken: Tensor | float) -> None:
        """Overwrites the logits: a product in place costs half of torch's vecdot, which allocates one."""
        share = taken / norm
        self.learned[..., rows] = share
        mean = logits.mul_(weights).sum(-1) / norm
        self.entropy[..., rows] = norm.log() * (1 - share) - mean

    def _column_sums(self, seen: BlockMask, weights: Tensor, norm: Tensor, stop: int) -> None:
        start = stop - weights.shape[-2]
        inverse = norm.reciprocal()
        summed = (inverse.unsqueeze(-2).flatten(0, 2) @ weights.flatten(0, 2)).view(*self.shape, -1)
        self.columns[..., seen.low : seen.high] += summed
        if stop == EARLY:
            self.early = self.columns[..., :EARLY].clone()
        if self.call.square:
            offset = start - seen.low  # negative where the block's first queries see no key
            for target, place in ((self.diagonal, offset), (self.previous, offset - 1)):
                part = weights.diagonal(place, -2, -1)
                queries = slice(max(0, -place), max(0, -place) + part.shape[-1])
                target[..., start:stop][..., queries] = part * inverse[..., queries]

    def _output(self, rows: slice, seen: BlockMask, weights: Tensor, norm: Tensor) -> None:
        mixed = self._mix(seen, weights)
        mixed /= norm.unsqueeze(-1)
        self._write(rows, mixed)

    def _mix(self, seen: BlockMask, weights: Tensor) -> Tensor:
        """The values summed with a block's weights, (B, G, R, rows, dv)."""
        batch, groups, repeat = self.shape
        count = weights.shape[-2]
        weights = weights.view(batch * groups, repeat * count, -1)
        mixed = torch.bmm(weights, self.value_rows[:, seen.low : seen.high])
        return mixed.view(batch, groups, repeat, count, -1)

    def _write(self, rows: slice, mixed: Tensor) -> None:
        self.out[:, rows] = mixed.permute(0, 3, 1, 2, 4)

    def _buffer(self, which: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """One of two scratch buffers, which all blocks share. They have room for every key at once: under a causal
        order each block is wider than the last, and new memory for each would cost as much as the exponentials."""
        size = math.prod(shape)
        if self.buffers is None or self.buffers[0].numel() < size:
            self.buffers = _areas(math.prod(shape[:-1]) * self.keys, self.dtype, self.call.query.device)
        return self.buffers[which][:size].view(shape)

    def finish(self) -> tuple[Tensor, AttentionSums]:
        """The attention output, [B, Tq, H, dv], and the sums of all blocks. Call it once, after the last block."""

        def heads(values: Tensor) -> Tensor:
            return values.flatten(1, 2)

        call = self.call
        sums = AttentionSums(
            first=heads(self.first),
            diagonal=heads(self.diagonal) if call.square else None,
            previous=heads(self.previous) if call.square else None,
            entropy=heads(self.entropy),
            margin=heads(self.margin),
            learned_sink=heads(self.learned),
            first_is_largest=heads(self.largest),
            logit_gap=self._known_gap(heads(self.gap)) if not call.linear else self._linear_gap(),
            columns=heads(self.columns),
            early_columns=None if self.early is None else heads(self.early),
            visible=call.visible.counts,
            sees_first=call.visible.sees_first,
            sees_few=call.visible.sees_few,
            seen_by=call.visible.seen_by,
            early_seen_by=call.visible.seen_by_first(EARLY),
            causal=call.visible.causal,
            row_total=None if self.total is None else heads(self.total),
            of_mask=call.visible.of_mask,
        )
        return self.out.flatten(2, 3), sums

    def _known_gap(self, gap: Tensor) -> Tensor:
        """logit_gap, NaN for a query of which the logits of some key that it averages over are not known."""
        visible = self.call.visible
        if not self.call.bias_of_seen:
            return gap
        queries, keys = self.call.lengths
        last = torch.arange(keys - queries, keys, device=gap.device) if visible.causal else keys - 1
        return gap.masked_fill(visible.counts != last + 1, torch.nan)

    def _linear_gap(self) -> Tensor:
        return linear_gap(self.call, self.dtype)


def _areas(room: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two scratch areas for `room` numbers. On a CPU they are kept for the thread's next call, unless they are large:
    the first write into new memory costs a fifth of reading a short sequence. A block uses no area after its end."""
    area = partial(torch.empty, room, dtype=dtype, device=device)
    if device.type != "cpu" or room * dtype.itemsize > KEPT_BYTES:
        return area(), area()
    kept: tuple[Tensor, Tensor] | None = getattr(_scratch, "areas", None)
    if kept is None or kept[0].dtype != dtype or kept[0].numel() < room:
        with torch.inference_mode(False):  # what is made in inference mode could not be written into outside it
            kept = _scratch.areas = (area(), area())
    return kept


def _check_fields(call: AttentionCall, understood: frozenset[str]) -> None:
    unknown = call.beyond(understood)
    if unknown:
        raise SinkscopeError(
            f"an attention call of score {call.score!r} sets {', '.join(unknown)}, which sinkscope does not compute: "
            f"an attention keyword may change only {', '.join(sorted(understood))}"
        )


def _sum_dtype(call: AttentionCall) -> torch.dtype:
    return torch.float64 if call.query.dtype == torch.float64 else torch.float32


def _margin(exponents: Tensor, rest: Tensor) -> Tensor:
    """log(A[i,0] / (1 - A[i,0])) in nats, from shifted logits (key 0 first) and `rest`, the sum of the others' exp.

    Where `rest` underflows (margins past about 69 nats) it is recomputed relative to its own largest term. NaN for a
    query that sees only key 0.
    """
    margin = exponents[..., 0] - rest.log()
    lost = rest < UNDERFLOW
    if lost.any():
        rows = exponents[lost]
        margin[lost] = rows[:, 0] - rows[:, 1:].logsumexp(-1)
    return margin.masked_fill_(margin > -FLOOR / 2, torch.nan)


def grouped(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(b | 1, h | 1, rows, keys) -> (b | 1, G | 1, R | 1, rows, keys), which broadcasts with the logits."""
    _, groups, repeat = shape
    if tensor.shape[1] == 1:
        return tensor.unsqueeze(2)
    return tensor.unflatten(1, (groups, repeat))


# The logit gap of plain scaled dot products, from mean keys: no logits are formed.


ROWS = 64
"""Queries taken at a time on a CPU: their tensors stay in its caches, which is two to three times as fast as memory."""


def linear_gap(call: AttentionCall, dtype: torch.dtype) -> Float[Tensor, "batch head query"]:
    """s_i0 - mean_j s_ij for plain scaled dot products: the mean of the logits is the logit of the mean key.

    Where keys are similar, k_0 - mean k nearly cancels, so it is computed in float64. Its products with q are in
    `dtype`.
    """
    batch, heads, queries, _ = call.query.shape
    groups, device = call.key.shape[1], call.query.device
    gap = torch.empty(batch, groups, heads // groups, queries, dtype=dtype, device=device)
    grouped_query = call.query.unflatten(1, (groups, -1))
    running = call.visible.causal and call.square
    first = as_widest(call.key[:, :, :1])
    total = torch.zeros_like(first) if running else as_widest(call.key).sub(first).mean(2, keepdim=True)
    step = ROWS if device.type == "cpu" else queries
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        mean = total
        if running:
            sums = running_sum(as_widest(call.key[:, :, rows]) - first).add_(total)
            total = sums[:, :, -1:].clone()
            counts = torch.arange(rows.start + 1, rows.stop + 1, device=device, dtype=sums.dtype)
            mean = sums.div_(counts[:, None])
        products = grouped_query[..., rows, :].to(dtype) * mean.to(dtype).unsqueeze(2)
        torch.sum(products, -1, out=gap[..., rows])
    return gap.mul_(-call.scaling).flatten(1, 2)


# The walk that sums attention of another score than softmax (`capture.scores`).
#
# It differs from the softmax walk in the step from logits to A, and in the meaning of a row's sums.


Kind = TypeVar("Kind", bound=Walk)


class UnnormalisedWalk(Walk):
    """Sums of raw A. Entropy, margin and learned-sink mass are NaN: they are defined for a softmax alone.

    Learned sinks are no part of such a call: their logits stand in the softmax's denominator.
    """

    UNDERSTOOD = Walk.UNDERSTOOD - {"sinks", "learned"} | {"score"}
    total: Tensor

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
        ones = torch.ones_like(self.total[..., rows])
        self._column_sums(seen, weights, ones, stop)
        self._output(rows, seen, weights, ones)


def walk_of(score: str, softmax: Callable[..., Kind], other: Callable[..., Kind]) -> Callable[..., Kind]:
    """What computes a call of that score: `softmax`, or `other`, a kind of UnnormalisedWalk, with the score's function.

    Raises SinkscopeError for an unknown score.
    """
    return softmax if score == "softmax" else partial(other, score=score_of(score))
