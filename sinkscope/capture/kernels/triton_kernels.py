"""Two Triton kernels that read one softmax attention call on a GPU: row sums with the output, then column sums.

Only `triton_call` imports this module, and only when it launches a call, so that a machine needs no Triton before that.
One program of `row_sums` processes a block of queries of one head against all key blocks that it sees (online softmax).
One program of `column_sums` processes a block of keys against all query blocks that see it. No two programs write the
same number, and each adds in a fixed order, so that the same call gives the same bytes each time.

Every logit, probability and sum is float32, also for bfloat16 and float16 inputs, whose products are exact in float32.
Float32 inputs are multiplied in full precision (`ieee`, never TF32). There is one exception: for the output alone, the
probabilities of keys 1.. are rounded to the values' dtype, as in torch's own fused attention.

The online softmax runs over keys 1.. and leaves out key 0. The margin of key 0 then comes from the log-sum-exp of the
other keys with full precision, and a sink that takes nearly all mass does not absorb the small terms of the others.

A launch processes queries start..start + count against keys low..low + span, in blocks of BLOCK_M queries and BLOCK_N
keys. `top`, `left`, `at_row` and `at_column` count from `start` and `low`; `place` is (start, count, low, span).
`reach` holds, for each block, the first and the end of the blocks of the other kind that it needs. `masks` is (hidden,
its strides along queries and keys, bias, its strides); these tensors begin at `start` and `low`. Offsets are 64-bit.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sinkscope.capture.kernels.triton_steps import (
    FLOOR,
    LOWEST,
    NEAR,
    dots,
    first_logits,
    gap_terms,
    logits_of,
    online,
    store_rows,
    tile,
)

VARIED = ["heads", "repeat", "queries", "keys", "plane", "start", "count", "low", "span"]
"""Arguments that change from call to call; compiling the kernels anew for their values would gain nothing."""


@triton.jit(do_not_specialize=[name for name in VARIED if name != "keys"])
@no_type_check
def row_sums(
    query, key, value, output, sums, peaks, hidden, bias, sinks, reach,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t,
    hidden_b, hidden_h, hidden_q, hidden_k, bias_b, bias_h, bias_q, bias_k, sinks_b, sinks_h, sinks_q,
    heads, repeat, queries, plane, start, count, low, span, scale, cap,
    CAUSAL: tl.constexpr, HIDDEN: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    GAP: tl.constexpr, SQUARE: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Writes the queries' output (B, Tq, H, dv), their eight row sums (the planes of `sums`, in the order of
    `triton_call.ROW_SUMS`) and, for `column_sums`, each row's peak logit and 1 / sum exp(s - peak) (the two planes of
    `peaks`). FIRST: low is 0, so that the keys include key 0.
    """
    blocks = tl.cdiv(count, BLOCK_M)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first
    batch, head = (program // blocks // heads).to(tl.int64), (program // blocks % heads).to(tl.int64)
    query += batch * query_b + head * query_h + start.to(tl.int64) * query_t
    key += batch * key_b + head // repeat * key_h + low.to(tl.int64) * key_t
    value += batch * value_b + head // repeat * value_h + low.to(tl.int64) * value_t
    masks = (
        hidden + batch * hidden_b + head * hidden_h, hidden_q, hidden_k,
        bias + batch * bias_b + head * bias_h, bias_q, bias_k,
    )  # fmt: skip
    place = (start, count, low, span)
    plane = plane.to(tl.int64)
    top, lanes, key_lanes = block * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at_row = top + lanes
    real = at_row < count
    held = tile(query, query_t, top, count, 0, WIDTH, BLOCK_M, SLICE)  # all channels, unless they are read in slices

    zero = tl.zeros([BLOCK_M], tl.float32)
    raw_first, first = zero, zero + FLOOR
    if FIRST:
        near = tl.arange(0, NEAR)
        few = dots(
            held, query, query_t, top, count, key, key_t, 0, span, WIDTH, BLOCK_M, NEAR, BLOCK_D, SLICE
        )  # fmt: skip
        few, few_seen = logits_of(
            few, top, lanes[:, None], 0, near[None, :], place, masks, scale, cap, CAUSAL, HIDDEN, BIAS, SOFTCAP
        )
        raw_first, first = first_logits(few, few_seen, near)

    peak, total, spread = zero + FLOOR, zero, zero  # over keys 1..: max s, sum e^(s - peak), that times (s - peak)
    gap, counted = zero, zero
    own, before = zero + FLOOR, zero + FLOOR
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin, end = tl.load(reach + 2 * block), tl.load(reach + 2 * block + 1)
    for step in range(begin, end):
        left = step * BLOCK_N
        at_column = left + key_lanes
        products = dots(
            held, query, query_t, top, count, key, key_t, left, span, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, SLICE
        )  # fmt: skip
        logits, seen = logits_of(
            products, top, lanes[:, None], left, key_lanes[None, :], place, masks, scale, cap, CAUSAL, HIDDEN, BIAS,
            SOFTCAP,
        )  # fmt: skip
        if GAP:
            more, number = gap_terms(logits, seen, raw_first, at_row, at_column, place, GAP)
            gap += more
            counted += number
        if SQUARE:
            ahead = low + left - (start + top)
            if (ahead < BLOCK_M) & (ahead + BLOCK_N >= 0):  # the tile touches the diagonal or the one below it
                behind = (start + at_row)[:, None] - (low + at_column)[None, :]
                own = tl.maximum(own, tl.max(tl.where(seen & (behind == 0), logits, FLOOR), 1))
                before = tl.maximum(before, tl.max(tl.where(seen & (behind == 1), logits, FLOOR), 1))
        others = seen & (low + at_column > 0)[None, :]
        weights, fade, peak, total, spread = online(logits, others, peak, total, spread)
        values = tile(value, value_t, left, span, 0, VALUE_WIDTH, BLOCK_N, BLOCK_V)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")

    taken_logit = zero + FLOOR
    if SINKS:
        sinks += batch * sinks_b + head * sinks_h + start.to(tl.int64) * sinks_q
        taken_logit = tl.load(sinks + at_row.to(tl.int64) * sinks_q, mask=real, other=FLOOR)
    at = (batch * heads + head) * queries + start + at_row
    highest, inverse, fade, share = store_rows(
        sums + at, plane, peaks + at, real, first, taken_logit, peak, total, spread
    )
    if GAP:
        tl.store(sums + at + 5 * plane, gap / tl.maximum(counted, 1.0), mask=real)
    if SQUARE:
        own = tl.where(own > LOWEST, tl.exp(own - highest), 0.0)
        before = tl.where(before > LOWEST, tl.exp(before - highest), 0.0)
        tl.store(sums + at + 6 * plane, own * inverse, mask=real)
        tl.store(sums + at + 7 * plane, before * inverse, mask=real)

    mixed *= (fade * inverse)[:, None]
    channels = tl.arange(0, BLOCK_V)
    if FIRST:
        first_value = tl.load(value + channels, mask=channels < VALUE_WIDTH, other=0.0).to(tl.float32)
        mixed += tl.where((first > LOWEST)[:, None], share[:, None] * first_value[None, :], 0.0)
    output += ((batch * queries + start + top) * heads + head) * VALUE_WIDTH
    tl.store(
        output + lanes[:, None] * heads * VALUE_WIDTH + channels[None, :],
        mixed.to(output.dtype.element_ty), mask=real[:, None] & (channels < VALUE_WIDTH)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=VARIED)
@no_type_check
def column_sums(
    query, key, peaks, sums, hidden, bias, reach,
    query_b, query_h, query_t, key_b, key_h, key_t,
    hidden_b, hidden_h, hidden_q, hidden_k, bias_b, bias_h, bias_q, bias_k,
    heads, repeat, queries, keys, plane, start, count, low, span, scale, cap,
    CAUSAL: tl.constexpr, HIDDEN: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Adds the sum over these queries of A[i, k] to `sums` (B, H, Tk).

    Tiles are (keys, queries), so that a sum over queries stays within a row of threads. The sums of tiles are added
    with Kahan's compensation, since a sink's column at T = 131072 has two thousand of them.
    """
    blocks = tl.cdiv(span, BLOCK_N)
    program = tl.program_id(0)
    block = program % blocks
    batch, head = (program // blocks // heads).to(tl.int64), (program // blocks % heads).to(tl.int64)
    query += batch * query_b + head * query_h + start.to(tl.int64) * query_t
    key += batch * key_b + head // repeat * key_h + low.to(tl.int64) * key_t
    masks = (
        hidden + batch * hidden_b + head * hidden_h, hidden_q, hidden_k,
        bias + batch * bias_b + head * bias_h, bias_q, bias_k,
    )  # fmt: skip
    place = (start, count, low, span)
    peaks += (batch * heads + head) * queries + start

    left, lanes, query_lanes = block * BLOCK_N, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    at_column = left + lanes
    held = tile(key, key_t, left, span, 0, WIDTH, BLOCK_N, SLICE)
    at = sums + (batch * heads + head) * keys + low + at_column
    total = tl.load(at, mask=at_column < span, other=0.0)
    lost = tl.zeros([BLOCK_N], tl.float32)
    begin, end = tl.load(reach + 2 * block), tl.load(reach + 2 * block + 1)
    for step in range(begin, end):
        top = step * BLOCK_M
        at_row = top + query_lanes
        products = dots(
            held, key, key_t, left, span, query, query_t, top, count, WIDTH, BLOCK_N, BLOCK_M, BLOCK_D, SLICE
        )  # fmt: skip
        logits, seen = logits_of(
            products, top, query_lanes[None, :], left, lanes[:, None], place, masks, scale, cap, CAUSAL, HIDDEN, BIAS,
            SOFTCAP,
        )  # fmt: skip
        peak = tl.load(peaks + at_row, mask=at_row < count, other=0.0)
        inverse = tl.load(peaks + plane.to(tl.int64) + at_row, mask=at_row < count, other=0.0)
        weights = tl.where(seen, tl.exp(tl.where(seen, logits, FLOOR) - peak[None, :]), 0.0)
        part = tl.sum(weights * inverse[None, :], 1) - lost
        larger = total + part
        lost = (larger - total) - part
        total = larger
    tl.store(at, total, mask=at_column < span)
