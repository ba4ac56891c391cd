"""The steps of the Triton kernels, compiled into them. `triton_kernels` explains the arguments."""

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
            mine = tile(ours, our_stride, our_first, our_count, left, WIDTH, OURS, SLICE)
            other = tile(theirs, their_stride, their_first, their_count, left, WIDTH, THEIRS, SLICE)
            products = tl.dot(mine, tl.trans(other), products, input_precision="ieee")
    else:
        other = tile(theirs, their_stride, their_first, their_count, 0, WIDTH, THEIRS, BLOCK_D)
        products = tl.dot(held, tl.trans(other), input_precision="ieee")
    return products


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
    logits = products * scale
    seen = (at_row < count) & (at_column < span)
    if SOFTCAP:
        logits = _tanh(logits / cap) * cap
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
def online(logits, others, peak, total, spread):
    """One step of the online softmax. Returns the tile's weights e^(s - peak), the factor that rescales earlier weights
    to the new peak, and the updated sums."""
    logits = tl.where(others, logits, FLOOR)
    higher = tl.maximum(peak, tl.max(logits, 1))
    logits -= higher[:, None]
    weights = tl.where(others, tl.exp(logits), 0.0)
    drop = peak - higher
    fade = tl.exp(drop)
    spread = (spread + total * drop) * fade + tl.sum(weights * logits, 1)
    return weights, fade, higher, total * fade + tl.sum(weights, 1), spread


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
