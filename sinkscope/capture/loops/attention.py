"""The compiled loops of one attention call: a block's weights with their row and column sums, and the logit gap."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np
from numba import njit

from sinkscope.capture.loops.compiling import ANY_ORDER, compiled

LEAST = np.float32(-87.0)
"""The least exponent whose exponential is a normal float32 number. Lower ones are raised to it."""

LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)
"""ln 2 in two parts. The first has nine bits, so that its product with a whole number below 2^15 is exact."""

TERMS = tuple(np.float32(1 / math.factorial(power)) for power in range(8))
"""Taylor's terms of exp. On [-ln 2 / 2, ln 2 / 2] the first one left out is below 6e-9 of the result."""

FAR = np.float32(60.0)
"""How far below key 0 every other key lies before their sum is taken relative to their own largest."""

MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign."""

LEAST_BITS = np.float32(-np.inf).view(np.int32) ^ MAGNITUDE
"""-inf, as `_largest` orders floats."""

CHUNK = 32
"""Rows whose column sums one thread adds up. It is fixed, so that the sums are the same for any number of threads."""

WEIGH = (
    "void(float32[:,:,::1], int64, int64, int64[:,:,:], int64[:,:,:], float32[:,:,:,::1], boolean[:,:,::1],"
    " float32[:,:,::1], int64, int64)"
)
GAPS = "void(float32[:,:,:,:,::1], float32[:,:,:,::1], boolean, float32[:,:,:,::1], int64, int64)"
"""The types of the arguments of `weigh` and `gaps`."""

ROW_SUMS = 6
FIRST, ENTROPY, MARGIN, PAIR_MARGIN, DIAGONAL, PREVIOUS = range(ROW_SUMS)
"""The places of the row sums in the first axis of `sums`. The loop checks no bounds."""


@njit(inline="always", fastmath={"contract"})
@no_type_check
def _exp(x):
    """exp(x) for x <= 0 within 3e-7 of its value: 2^n exp(r) with |r| <= ln 2 / 2."""
    x = max(x, LEAST)
    whole = np.int32(x * LOG2_E - np.float32(0.5))
    n = np.float32(whole)
    r = x - n * LN2_HIGH - n * LN2_LOW
    series = TERMS[7]
    series = series * r + TERMS[6]
    series = series * r + TERMS[5]
    series = series * r + TERMS[4]
    series = series * r + TERMS[3]
    series = series * r + TERMS[2]
    series = (series * r) * r + r + TERMS[0]
    return series * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@njit
@no_type_check
def _largest(line):
    """The largest number of a line; -inf of an empty one. The processor compares many whole numbers at once, but floats
    one by one, so it compares the bits. Those of a negative float are exchanged first, which puts them in order."""
    bits = line.view(np.int32)
    largest = np.int32(LEAST_BITS)
    for place in range(len(bits)):
        pattern = bits[place]
        largest = max(largest, np.int32(pattern ^ ((pattern >> 31) & MAGNITUDE)))
    return np.int32(largest ^ ((largest >> 31) & MAGNITUDE)).view(np.float32)


@njit(inline="always", fastmath=ANY_ORDER)
@no_type_check
def _total(line, top):
    """The sum of exp(x - top) over a line."""
    total = np.float32(0.0)
    for key in range(len(line)):
        total += _exp(line[key] - top)
    return total


@njit(inline="always", fastmath=ANY_ORDER)
@no_type_check
def _exponentials(line, top):
    """Puts exp(x - top) in the place of each x; returns their sum, and that of each times x - top."""
    total, mean = np.float32(0.0), np.float32(0.0)
    for key in range(len(line)):
        below = line[key] - top
        weight = _exp(below)
        line[key] = weight
        total += weight
        mean += weight * below
    return total, mean


@njit(inline="always", fastmath=ANY_ORDER)
@no_type_check
def _divide(line, inverse, columns):
    """Turns weights into shares in place, and adds these to the sums of their columns."""
    for key in range(len(line)):
        share = line[key] * inverse
        line[key] = share
        columns[key] += share


@compiled(WEIGH)
@no_type_check
def weigh(logits, start, low, firsts, pasts, sums, largest, columns, begin, step):
    """Turns logits into probabilities in place, and writes the sums of their rows and columns.

    Args:
        logits: of a block of queries, (sequence and head, row, key), float32. Keys that a query may not see become 0.
        start: the index of the block's first query.
        low: the index of the block's first key.
        firsts, pasts: the first key that a query sees and the one after its last, (sequence, head, query).
        sums: row sums, (place, sequence, head, query). The block's queries are written; both margins, over all other
            keys and over the best of them, stay as they are where there is none: the query sees only key 0, or all but
            it.
        largest: whether key 0 has the row's largest logit, (sequence, head, query).
        columns: sums over CHUNK rows, (sequence and head, chunk, key), zero before the call.
        begin, step: the chunks that this call takes: begin, begin + step, and so on, counted over all pairs.
    """
    pairs, count, width = logits.shape
    heads = firsts.shape[1]
    chunks = columns.shape[1]
    for item in range(begin, pairs * chunks, step):
        pair, chunk = item // chunks, item % chunks
        sequence, head = pair // heads, pair % heads
        column = columns[pair, chunk]
        for row in range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)):
            query = start + row
            line = logits[pair, row]
            # A query that sees no key has its first one past the last key: numba checks no bounds, so both are cut.
            first = min(max(firsts[sequence, head, query] - low, 0), width)
            past = min(max(pasts[sequence, head, query] - low, first), width)
            sees_first = low == 0 and first == 0 and past > 0
            # Loops run over slices from 0: numba would ask of every other index whether it is negative.
            seen, seen_columns = line[first:past], column[first:past]
            others = seen[1:] if sees_first else seen

            logit, peak = seen[0] if sees_first else np.float32(-np.inf), _largest(others)
            top = max(logit, peak)
            has_margin = sees_first and len(others) > 0
            is_far = has_margin and logit - peak > FAR
            if has_margin:
                sums[PAIR_MARGIN, sequence, head, query] = logit - peak
            if is_far:
                sums[MARGIN, sequence, head, query] = logit - peak - math.log(_total(others, peak))

            rest, mean = _exponentials(others, top)
            norm = rest
            if sees_first:
                weight = _exp(logit - top)
                seen[0] = weight
                norm += weight
                mean += weight * (logit - top)
                if has_margin and not is_far:
                    sums[MARGIN, sequence, head, query] = logit - top - math.log(rest)

            line[:first] = 0
            line[past:] = 0
            if past > first:
                inverse = np.float32(1.0) / norm
                _divide(seen, inverse, seen_columns)
                sums[ENTROPY, sequence, head, query] = math.log(norm) - mean * inverse
                if sees_first:
                    sums[FIRST, sequence, head, query] = seen[0]
                    largest[sequence, head, query] = logit >= top
            diagonal = query - low
            if 0 <= diagonal < width:
                sums[DIAGONAL, sequence, head, query] = line[diagonal]
            if 0 < diagonal <= width:
                sums[PREVIOUS, sequence, head, query] = line[diagonal - 1]


@compiled(GAPS)
@no_type_check
def gaps(query, key, running, out, begin, step):
    """Writes q_i (mean_j k_j - k_0): minus the logit gap of plain scaled dot products, before the scaling.

    Args:
        query: (sequence, query, group, head of the group, channel): models hold a token's heads side by side.
        key: (sequence, key, group, channel).
        running: the mean is over keys 0 to i, else over all keys. It is float64: k_0 and the mean nearly cancel where
            keys are similar.
        out: (sequence, group, head of the group, query).
        begin, step: the pairs of sequence and group that this call takes, as for `weigh`.
    """
    sequences, queries, groups, repeat, width = query.shape
    for item in range(begin, sequences * groups, step):
        sequence, group = item // groups, item % groups
        keys, first = key.shape[1], key[sequence, 0, group]
        total, mean = np.zeros(width), np.zeros(width, np.float32)
        if not running:
            for place in range(keys):
                line = key[sequence, place, group]
                for channel in range(width):
                    total[channel] += np.float64(line[channel]) - np.float64(first[channel])
            for channel in range(width):
                mean[channel] = total[channel] / keys
        for place in range(queries):
            if running:
                line, share = key[sequence, place, group], 1.0 / (place + 1)
                for channel in range(width):
                    total[channel] += np.float64(line[channel]) - np.float64(first[channel])
                    mean[channel] = total[channel] * share
            for head in range(repeat):
                line = query[sequence, place, group, head]
                product = np.float32(0.0)
                for channel in range(width):
                    product += line[channel] * mean[channel]
                out[sequence, group, head, place] = product
