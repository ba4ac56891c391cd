"""The compiled loops over the vectors of tokens and of queries: norms, cosines, peaks, moments, medians and bits."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np
from numba import njit

from sinkscope.capture.loops.compiling import compiled

TOKENS = "void(float32[:,:,::1], boolean, float32[:,:,::1], float32[:,:,::1], int64, int64)"
QUERIES = (
    "void(float32[:,:,:,:,::1], float32[:,:,:,::1], boolean, float32[:,:,:,::1], float32[:,:,:,::1], float64[:,:,::1],"
    " int64, int64)"
)

MEDIANS = "void(float32[:,::1], float32[::1], int64, int64)"

MARKS = "void(int64[:,::1], int64[:,::1], int64[::1], int64, int64)"

NORM, PRODUCT, PEAK, KURTOSIS = range(4)
"""The places of a token's facts in the first axis of `facts`."""

MAGNITUDE = np.int32(0x7FFFFFFF)
COARSE = 17
"""The lower bits that a count of magnitudes leaves out: buckets 1.6 % wide, whose counts take 64 KiB."""


@njit
@no_type_check
def _float(bits):
    return np.int32(bits).view(np.float32)


@njit
@no_type_check
def _peak(line):
    """The largest abs number of a line, NaN where one is. The processor compares many whole numbers at once, but floats
    one by one; without their sign, the bits of floats are in order."""
    bits, peak = line.view(np.int32), np.int32(0)
    for place in range(len(bits)):
        peak = max(peak, np.int32(bits[place] & MAGNITUDE))
    return _float(peak)


@compiled(TOKENS)
@no_type_check
def read_tokens(x, whole, facts, units, begin, step):
    """Reads every token of some sequences once.

    Args:
        x: (sequence, token, channel).
        whole: also peaks and kurtosis, which only the residual stream's tokens are asked for.
        facts: (place, sequence, token): norm; product with the sequence's first token; largest abs element, NaN where
            an element is; excess kurtosis of the elements, from float64 moments.
        units: the sum of x_j / norm x_j over tokens 1 and later without those of norm 0, and in the last channel their
            number. (sequence, 1, channel + 1).
        begin, step: the sequences that this call takes: begin, begin + step, and so on.
    """
    sequences, tokens, width = x.shape
    for sequence in range(begin, sequences, step):
        first, unit = x[sequence, 0], units[sequence, 0]
        total, counted = np.zeros(width), 0
        for token in range(tokens):
            line = x[sequence, token]
            squares, product = np.float32(0.0), np.float32(0.0)
            for channel in range(width):
                squares += line[channel] * line[channel]
                product += line[channel] * first[channel]
            norm = np.float32(math.sqrt(squares))
            facts[NORM, sequence, token], facts[PRODUCT, sequence, token] = norm, product
            if token > 0 and norm != 0:
                inverse = np.float32(1.0) / norm
                for channel in range(width):
                    total[channel] += line[channel] * inverse
                counted += 1
            if whole:
                mean = 0.0
                for channel in range(width):
                    mean += line[channel]
                mean /= width
                second, fourth = 0.0, 0.0
                for channel in range(width):
                    square = (line[channel] - mean) * (line[channel] - mean)
                    second += square
                    fourth += square * square
                facts[PEAK, sequence, token] = _peak(line)
                facts[KURTOSIS, sequence, token] = width * fourth / (second * second) - 3.0 if second > 0 else np.nan
        for channel in range(width):
            unit[channel] = total[channel]
        unit[width] = counted


@njit
@no_type_check
def _ranked(sizes, rank):
    """The float whose bits have the given rank, from 0, among these; at most 31 countings find it."""
    low, high = np.int64(0), np.int64(MAGNITUDE)
    while low < high:
        middle = (low + high) // 2
        bound, within = np.int32(middle), 0
        for place in range(len(sizes)):
            within += sizes[place] <= bound
        if within > rank:
            high = middle
        else:
            low = middle + 1
    return _float(low)


@compiled(MEDIANS)
@no_type_check
def read_medians(x, medians, begin, step):
    """Writes the median of |x| of each row: the mean of the two middle values for an even count, NaN if any x is.

    Without their sign, the bits of floats are in order. Counts of their upper bits find the few numbers around the
    middle, and a search by halves finds the middle ones among these.

    Args:
        x: (row, element).
        medians: (row).
        begin, step: the rows that this call takes.
    """
    rows, count = x.shape
    counts, near = np.zeros(1 << (31 - COARSE), np.int32), np.empty(count, np.int32)
    lower, upper = (count - 1) // 2, count // 2
    for row in range(begin, rows, step):
        bits = x[row].view(np.int32)
        counts[:] = 0
        for place in range(count):
            counts[(bits[place] & MAGNITUDE) >> COARSE] += 1
        first, below = 0, 0
        while below + counts[first] <= lower:
            below += counts[first]
            first += 1
        last, upto = first, below + counts[first]
        while upto <= upper:
            last += 1
            upto += counts[last]
        filled = 0
        for place in range(count):
            size = bits[place] & MAGNITUDE
            if first <= (size >> COARSE) <= last:
                near[filled] = size
                filled += 1
        middle = (_ranked(near[:filled], lower - below) + _ranked(near[:filled], upper - below)) / np.float32(2.0)
        medians[row] = np.float32(np.nan) if np.isnan(_peak(x[row])) else middle


@compiled(QUERIES)
@no_type_check
def read_queries(query, key, causal, norms, units, paired, begin, step):
    """Reads every query of some groups once, and with `causal` its key.

    Args:
        query: (sequence, query, group, head of the group, channel): models hold a token's heads side by side.
        key: (sequence, key, group, channel).
        causal: also `paired`; there are as many keys as queries.
        norms: norm q_i, (sequence, group, head, query).
        units: the sum of q_i / norm q_i over queries 1 and later, (sequence, group, head, channel).
        paired: the sum over pairs 1 <= j <= i of cos(q_i, k_j), (sequence, group, head).
        begin, step: the pairs of sequence and group that this call takes.
    """
    sequences, queries, groups, repeat, width = query.shape
    for item in range(begin, sequences * groups, step):
        sequence, group = item // groups, item % groups
        seen, total = np.zeros(width, np.float32), np.zeros((repeat, width))
        exact = np.zeros(width)
        for place in range(queries):
            if causal and place > 0:
                line, squares = key[sequence, place, group], np.float32(0.0)
                for channel in range(width):
                    squares += line[channel] * line[channel]
                inverse = np.float32(1.0) / np.float32(math.sqrt(squares)) if squares > 0 else np.float32(0.0)
                for channel in range(width):
                    exact[channel] += line[channel] * inverse
                    seen[channel] = exact[channel]
            for head in range(repeat):
                line = query[sequence, place, group, head]
                squares, product = np.float32(0.0), np.float32(0.0)
                for channel in range(width):
                    squares += line[channel] * line[channel]
                    product += line[channel] * seen[channel]
                norm = np.float32(math.sqrt(squares))
                norms[sequence, group, head, place] = norm
                if place > 0 and norm != 0:
                    inverse = np.float32(1.0) / norm
                    sums = total[head]
                    for channel in range(width):
                        sums[channel] += line[channel] * inverse
                    paired[sequence, group, head] += np.float64(product * inverse)
        for head in range(repeat):
            for channel in range(width):
                units[sequence, group, head, channel] = total[head, channel]


@compiled(MARKS)
@no_type_check
def read_marks(words, factors, marks, begin, step):
    """Sums each row's words, times factors: modulo 2**64, as the processor computes with whole numbers.

    Args:
        words: (row, word).
        factors: a word's factor, and that of its upper half, (2, word).
        marks: (row).
        begin, step: the rows that this call takes.
    """
    (rows, count), whole, upper = words.shape, factors[0], factors[1]
    for row in range(begin, rows, step):
        line, total = words[row], 0
        for place in range(count):
            total += line[place] * whole[place] + (line[place] >> 32) * upper[place]
        marks[row] = total
