"""Two Triton kernels that read one softmax attention call on a GPU: row sums with the output, then column sums."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# `no_type_check` keeps the test suite's run-time type checks out of functions that are compiled, not called.

FLOOR = tl.constexpr(-1e30)
"""A hidden key's logit: finite, so that 0 * FLOOR is 0, and exp(FLOOR - peak) is exactly 0."""
LOWEST = tl.constexpr(-5e29)
"""A logit at or below this belongs to a key that the bias hides."""
CAUSAL_GAP, SEEN_GAP = tl.constexpr(1), tl.constexpr(2)
NEAR = tl.constexpr(16)
"""Keys in the tile that computes key 0's logits: the fewest that a matrix product takes."""


@triton.jit
@no_type_check
def _tanh(x):
    """tanh to float32 precision everywhere: by its series near 0, where 1 - exp(-2x) would lose digits."""
    square = x * x
    series = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075))
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * series)))
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.4, x * series, tl.where(x < 0, -far, far))


@triton.jit
@no_type_check
def tile(vectors, stride, first, count, left, WIDTH: tl.constexpr, NUMBER: tl.constexpr, SIZE: tl.constexpr):
    """Channels left..left + SIZE of NUMBER vectors from `first` on, as rows; 0 past the last vector and channel."""
    lanes, channels = tl.arange(0, NUMBER), left + tl.arange(0, SIZE)
    there = (first + lanes < count)[:, None] & (channels < WIDTH)[None, :]
    vectors += tl.cast(first, tl.int64) * stride
    return tl.load(vectors + lanes[:, None] * stride + channels[None, :], mask=there, other=0.0)


@triton.jit
@no_type_check
def dots(
    held, ours, our_stride, our_first, our_count, theirs, their_stride, their_first, their_count,
    WIDTH: tl.constexpr, OURS: tl.constexpr, THEIRS: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Dot products of OURS vectors from `our_first` on with THEIRS from `their_first` on. `held` is our tile.

    Where SLICE is less than BLOCK_D, `held` is not used and our vectors are read again slice by slice: a float32
    product without tensor cores keeps its operands in registers, where wide ones would not fit.
    """
    if SLICE < BLOCK_D:
        products = tl.zeros([OURS, THEIRS], tl.float32)
        for left in range(0, BLOCK_D, SLICE):
            our_tile = tile(ours, our_stride, our_first, our_count, left, WIDTH, OURS, SLICE)
            their_tile = tile(theirs, their_stride, their_first, their_count, left, WIDTH, THEIRS, SLICE)
            products = tl.dot(our_tile, tl.trans(their_tile), products, input_precision="ieee")
    else:
        their_tile = tile(theirs, their_stride, their_first, their_count, 0, WIDTH, THEIRS, BLOCK_D)
        products = tl.dot(held, tl.trans(their_tile), input_precision="ieee")
    return products


@triton.jit
@no_type_check
def scaled(products, scale, cap, SOFTCAP: tl.constexpr):
    """Logits before mask and bias."""
    logits = products * scale
    if SOFTCAP:
        logits = _tanh(logits / cap) * cap
    return logits


@triton.jit
@no_type_check
def logits_of(
    products, first_row, row_lanes, first_column, column_lanes, place, masks, scale, cap,
    CAUSAL: tl.constexpr, HIDDEN: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A tile's logits with the bias added but no key hidden, and which of its pairs are seen. Row and column lanes
    broadcast to the tile."""
    start, count, low, span = place
    hidden, hidden_q, hidden_k, bias, bias_q, bias_k = masks
    at_row, at_column = first_row + row_lanes, first_column + column_lanes
    logits = scaled(products, scale, cap, SOFTCAP)
    seen = (at_row < count) & (at_column < span)
    if BIAS:
        bias += tl.cast(first_row, tl.int64) * bias_q + tl.cast(first_column, tl.int64) * bias_k
        added = tl.load(bias + row_lanes * bias_q + column_lanes * bias_k, mask=seen, other=0.0)
        logits += tl.maximum(added.to(tl.float32), FLOOR)
    if HIDDEN:
        hidden += tl.cast(first_row, tl.int64) * hidden_q + tl.cast(first_column, tl.int64) * hidden_k
        seen = seen & (tl.load(hidden + row_lanes * hidden_q + column_lanes * hidden_k, mask=seen, other=1) == 0)
    if CAUSAL:
        seen = seen & (low + at_column <= start + at_row)
    if BIAS:
        seen = seen & (logits > LOWEST)
    return logits, seen


@triton.jit
@no_type_check
def first_logits(logits, seen, lanes):
    """Key 0's logits from the tile that holds it: for all queries, and with FLOOR for queries that do not see it."""
    is_first = (lanes == 0)[None, :]
    raw = tl.sum(tl.where(is_first, logits, 0.0), 1)
    return raw, tl.where(tl.sum((seen & is_first).to(tl.int32), 1) > 0, raw, FLOOR)


@triton.jit
@no_type_check
def gap_terms(logits, seen, raw_first, at_row, at_column, place, GAP: tl.constexpr):
    """The sum of s_i0 - s_ij over those keys of a tile that `logit_gap` averages, and the number of these keys."""
    start, count, low, span = place
    allowed = (at_row < count)[:, None] & (at_column < span)[None, :]
    if GAP == CAUSAL_GAP:
        allowed = allowed & ((low + at_column)[None, :] <= (start + at_row)[:, None])
    if GAP == SEEN_GAP:
        allowed = seen
    return tl.sum(tl.where(allowed, raw_first[:, None] - logits, 0.0), 1), tl.sum(allowed.to(tl.float32), 1)


@triton.jit
@no_type_check
def online(logits, others, peak, total, spread, ALL: tl.constexpr):
    """One step of the online softmax, over all keys of the tile or over `others`. Returns the tile's weights
    e^(s - peak), the factor that rescales earlier weights to the new peak, and the updated sums."""
    if not ALL:
        logits = tl.where(others, logits, FLOOR)
    higher = tl.maximum(peak, tl.max(logits, 1))
    logits -= higher[:, None]
    weights = tl.exp(logits)
    if not ALL:
        weights = tl.where(others, weights, 0.0)
    drop = peak - higher
    fade = tl.exp(drop)
    spread = (spread + total * drop) * fade + tl.sum(weights * logits, 1)
    return weights, fade, higher, total * fade + tl.sum(weights, 1), spread


@triton.jit
@no_type_check
def whole_tiles(
    begin, end, top, place, FIRST: tl.constexpr, CAUSAL: tl.constexpr, NONE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The first and the end of those tiles of begin..end whose every pair is seen and none is of key 0; under a causal
    order none is of a query with itself or with the key before it either. NONE: there is none, because of a mask, or
    because products slice by slice leave no registers for a loop of their own."""
    start, _, low, span = place
    inner, outer = begin, end
    if NONE:
        outer = begin
    else:
        if FIRST:
            inner = tl.maximum(begin, 1)
        outer = tl.minimum(outer, span // BLOCK_N)
        if CAUSAL:
            outer = tl.minimum(outer, tl.maximum(start + top - low - 1, 0) // BLOCK_N)
        inner = tl.minimum(inner, end)
        outer = tl.maximum(inner, outer)
    return inner, outer


@triton.jit
@no_type_check
def row_tile(
    left, held, query, query_t, key, key_t, value, value_t, top, lanes, key_lanes, raw_first,
    peak, total, spread, gap, counted, diagonal, before, mixed, place, masks, scale, cap, ALL: tl.constexpr,
    CAUSAL: tl.constexpr, HIDDEN: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, GAP: tl.constexpr,
    SQUARE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `left` on to a block's row sums and output. ALL: one of `whole_tiles`."""
    start, count, low, span = place
    at_row, at_column = top + lanes, left + key_lanes
    products = dots(
        held, query, query_t, top, count, key, key_t, left, span, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, SLICE
    )  # fmt: skip
    if ALL:
        logits, seen = scaled(products, scale, cap, SOFTCAP), True
    else:
        logits, seen = logits_of(
            products, top, lanes[:, None], left, key_lanes[None, :], place, masks, scale, cap, CAUSAL, HIDDEN, BIAS,
            SOFTCAP,
        )  # fmt: skip
    if GAP:
        if ALL:
            gap += tl.sum(raw_first[:, None] - logits, 1)
            counted += BLOCK_N
        else:
            more, number = gap_terms(logits, seen, raw_first, at_row, at_column, place, GAP)
            gap += more
            counted += number
    if SQUARE and not (ALL and CAUSAL):
        ahead = low + left - (start + top)
        if (ahead < BLOCK_M) & (ahead + BLOCK_N >= 0):  # the tile touches the diagonal or the one below it
            behind = (start + at_row)[:, None] - (low + at_column)[None, :]
            diagonal = tl.maximum(diagonal, tl.max(tl.where(seen & (behind == 0), logits, FLOOR), 1))
            before = tl.maximum(before, tl.max(tl.where(seen & (behind == 1), logits, FLOOR), 1))
    others = seen
    if not ALL:
        others = seen & (low + at_column > 0)[None, :]
    weights, fade, peak, total, spread = online(logits, others, peak, total, spread, ALL)
    values = tile(value, value_t, left, span, 0, VALUE_WIDTH, BLOCK_N, BLOCK_V)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return peak, total, spread, gap, counted, diagonal, before, mixed


@triton.jit
@no_type_check
def store_rows(at, plane, peaks, real, first, taken_logit, peak, total, spread):
    """Stores the row sums, from the logits of key 0 and of the learned sink and the online softmax of the other keys.

    Returns what the caller scales by: the row's highest logit, 1 / its norm, the factor that rescales the other keys'
    weights, and A[i,0].
    """
    sees_first, has_sink = first > LOWEST, taken_logit > LOWEST
    rest_peak = tl.maximum(peak, taken_logit)
    rest = total * tl.exp(peak - rest_peak) + tl.where(has_sink, tl.exp(taken_logit - rest_peak), 0.0)
    has_margin = sees_first & (rest > 0)
    margin = first - rest_peak - tl.log(tl.where(has_margin, rest, 1.0))
    highest = tl.maximum(rest_peak, first)
    fade = tl.exp(peak - highest)
    weight = tl.where(sees_first, tl.exp(first - highest), 0.0)
    taken = tl.where(has_sink, tl.exp(taken_logit - highest), 0.0)
    norm = total * fade + taken + weight
    norm = tl.where(norm == 0, 1.0, norm)  # a query that sees no key: all its sums are 0
    inverse = 1 / norm
    spread = (spread + total * (peak - highest)) * fade + weight * (first - highest)
    share = taken * inverse
    tl.store(at, weight * inverse, mask=real)
    tl.store(at + plane, tl.log(norm) * (1 - share) - spread * inverse, mask=real)
    tl.store(at + 2 * plane, tl.where(has_margin, margin, float("nan")), mask=real)
    tl.store(at + 3 * plane, share, mask=real)
    tl.store(at + 4 * plane, tl.where(sees_first & (first >= peak), 1.0, 0.0), mask=real)
    tl.store(peaks, highest, mask=real)
    tl.store(peaks + plane, inverse, mask=real)
    return highest, inverse, fade, weight * inverse


@triton.jit
@no_type_check
def column_tile(
    top, held, query, query_t, key, key_t, peaks, plane, left, lanes, query_lanes, total, lost,
    place, masks, scale, cap, ALL: tl.constexpr,
    CAUSAL: tl.constexpr, HIDDEN: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Adds the queries from `top` on to a block's column sums. ALL: each of them sees all keys of the block.

    A query past the last one has 0 for 1 / sum exp(s - peak), so that it adds 0.
    """
    _, count, _, span = place
    at_row = top + query_lanes
    products = dots(
        held, key, key_t, left, span, query, query_t, top, count, WIDTH, BLOCK_N, BLOCK_M, BLOCK_D, SLICE
    )  # fmt: skip
    peak = tl.load(peaks + at_row, mask=at_row < count, other=0.0)
    inverse = tl.load(peaks + plane.to(tl.int64) + at_row, mask=at_row < count, other=0.0)
    if ALL:
        weights = tl.exp(scaled(products, scale, cap, SOFTCAP) - peak[None, :])
    else:
        logits, seen = logits_of(
            products, top, query_lanes[None, :], left, lanes[:, None], place, masks, scale, cap, CAUSAL, HIDDEN, BIAS,
            SOFTCAP,
        )  # fmt: skip
        weights = tl.where(seen, tl.exp(tl.where(seen, logits, FLOOR) - peak[None, :]), 0.0)
    part = tl.sum(weights * inverse[None, :], 1) - lost
    larger = total + part
    return larger, (larger - total) - part


# Two Triton kernels that read one softmax attention call on a GPU: row sums with the output, then column sums.
#
# Only `triton_call` imports this module, and only when it launches a call, so that a machine needs no Triton before
# that. One program of `row_sums` processes a block of queries of one head against all key blocks that it sees (online
# softmax). One program of `column_sums` processes a block of keys against all query blocks that see it. No two programs
# write the same number, and each adds in a fixed order, so that the same call gives the same bytes each time.
#
# Every logit, probability and sum is float32, also for bfloat16 and float16 inputs, whose products are exact in
# float32. Float32 inputs are multiplied in full precision (`ieee`, never TF32). There is one exception: for the output
# alone, the probabilities of keys 1.. are rounded to the values' dtype, as in torch's own fused attention.
#
# The online softmax runs over keys 1.. and leaves out key 0. The margin of key 0 then comes from the log-sum-exp of the
# other keys with full precision, and a sink that takes nearly all mass does not absorb the small terms of the others.
#
# A launch processes queries start..start + count against keys low..low + span, in blocks of BLOCK_M queries and BLOCK_N
# keys. `top`, `left`, `at_row` and `at_column` count from `start` and `low`; `place` is (start, count, low, span).
# `reach` holds, for each block, the first and the end of the blocks of the other kind that it needs. `masks` is
# (hidden, its strides along queries and keys, bias, its strides); these tensors begin at `start` and `low`. Offsets are
# 64-bit.


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
    """Writes the queries' output (B, Tq, H, dv), their row sums (the planes of `sums`, in the order of
    `triton_call.ROW_SUMS`, then the sum over all keys where SINKS) and, for `column_sums`, each row's peak logit and
    1 / sum exp(s - peak) (the two planes of `peaks`). FIRST: low is 0, so that the keys include key 0.
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
    diagonal, before = zero + FLOOR, zero + FLOOR
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin, end = tl.load(reach + 2 * block), tl.load(reach + 2 * block + 1)
    inner, outer = whole_tiles(begin, end, top, place, FIRST, CAUSAL, HIDDEN or BIAS or SLICE < BLOCK_D, BLOCK_N)
    for turn in range(begin, end - (outer - inner)):  # tiles with a pair to leave out
        step = tl.where(turn < inner, turn, turn + outer - inner)
        peak, total, spread, gap, counted, diagonal, before, mixed = row_tile(
            step * BLOCK_N, held, query, query_t, key, key_t, value, value_t, top, lanes, key_lanes, raw_first,
            peak, total, spread, gap, counted, diagonal, before, mixed, place, masks, scale, cap, False,
            CAUSAL, HIDDEN, BIAS, SOFTCAP, GAP, SQUARE, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, SLICE,
        )  # fmt: skip
    if not (HIDDEN or BIAS or SLICE < BLOCK_D):
        for step in range(inner, outer):
            peak, total, spread, gap, counted, diagonal, before, mixed = row_tile(
                step * BLOCK_N, held, query, query_t, key, key_t, value, value_t, top, lanes, key_lanes, raw_first,
                peak, total, spread, gap, counted, diagonal, before, mixed, place, masks, scale, cap, True, CAUSAL,
                HIDDEN, BIAS, SOFTCAP, GAP, SQUARE, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, SLICE,
            )  # fmt: skip

    taken_logit = zero + FLOOR
    if SINKS:
        sinks += batch * sinks_b + head * sinks_h + start.to(tl.int64) * sinks_q
        taken_logit = tl.load(sinks + at_row.to(tl.int64) * sinks_q, mask=real, other=FLOOR)
    at = (batch * heads + head) * queries + start + at_row
    highest, inverse, fade, share = store_rows(
        sums + at, plane, peaks + at, real, first, taken_logit, peak, total, spread
    )
    if SINKS:
        tl.store(sums + at + 8 * plane, total * fade * inverse + share, mask=real)
    if GAP:
        tl.store(sums + at + 5 * plane, gap / tl.maximum(counted, 1.0), mask=real)
    if SQUARE:
        diagonal = tl.where(diagonal > LOWEST, tl.exp(diagonal - highest), 0.0)
        before = tl.where(before > LOWEST, tl.exp(before - highest), 0.0)
        tl.store(sums + at + 6 * plane, diagonal * inverse, mask=real)
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
    inner = end
    if not (HIDDEN or BIAS or SLICE < BLOCK_D):
        inner = begin
        if CAUSAL:  # the first block of queries that all see all keys of the block
            inner = tl.minimum(end, tl.maximum(begin, tl.cdiv(low + left + BLOCK_N - 1 - start, BLOCK_M)))
    for step in range(begin, inner):
        total, lost = column_tile(
            step * BLOCK_M, held, query, query_t, key, key_t, peaks, plane, left, lanes, query_lanes, total, lost,
            place, masks, scale, cap, False,
            CAUSAL, HIDDEN, BIAS, SOFTCAP, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
        )  # fmt: skip
    if not (HIDDEN or BIAS or SLICE < BLOCK_D):
        for step in range(inner, end):
            total, lost = column_tile(
                step * BLOCK_M, held, query, query_t, key, key_t, peaks, plane, left, lanes, query_lanes, total, lost,
                place, masks, scale, cap, True,
                CAUSAL, HIDDEN, BIAS, SOFTCAP, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
            )  # fmt: skip
    tl.store(at, total, mask=at_column < span)
