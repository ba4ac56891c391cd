"""The compiled loops over the vectors of tokens and of queries: norms, cosines, peaks and moments in one reading."""

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

NORM, PRODUCT, PEAK, KURTOSIS = range(4)
"""The places of a token's facts in the first axis of `facts`."""

MAGNITUDE = np.int32(0x7FFFFFFF)


@njit
@no_type_check
def _peak(line):
    """The largest abs number of a line, NaN where one is. The processor compares many whole numbers at once, but floats
    one by one; without their sign, the bits of floats are in order."""
    bits, peak = line.view(np.int32), np.int32(0)
    for place in range(len(bits)):
        peak = max(peak, np.int32(bits[place] & MAGNITUDE))
    return np.int32(peak).view(np.float32)


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


@compiled(QUERIES)
@no_type_check
def read_queries(query, key, causal, norms, units, paired, begin, step):
    """Reads every query of some groups once, and with `causal` its key.

    Args:
        query: (sequence, group, head of the group, query, channel).
        key: (sequence, group, key, channel).
        causal: also `paired`; there are as many keys as queries.
        norms: norm q_i, (sequence, group, head, query).
        units: the sum of q_i / norm q_i over queries 1 and later, (sequence, group, head, channel).
        paired: the sum over pairs 1 <= j <= i of cos(q_i, k_j), (sequence, group, head).
        begin, step: the pairs of sequence and group that this call takes.
    """
    sequences, groups, repeat, queries, width = query.shape
    for item in range(begin, sequences * groups, step):
        sequence, group = item // groups, item % groups
        seen, total = np.zeros(width, np.float32), np.zeros((repeat, width))
        exact = np.zeros(width)
        for place in range(queries):
            if causal and place > 0:
                line, squares = key[sequence, group, place], np.float32(0.0)
                for channel in range(width):
                    squares += line[channel] * line[channel]
                inverse = np.float32(1.0) / np.float32(math.sqrt(squares)) if squares > 0 else np.float32(0.0)
                for channel in range(width):
                    exact[channel] += line[channel] * inverse
                    seen[channel] = exact[channel]
            for head in range(repeat):
                line = query[sequence, group, head, place]
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
