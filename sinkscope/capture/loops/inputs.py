"""The compiled loop over the input of a linear module: largest entries, and how many round to 0 in 8-bit integers."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numba import njit

from sinkscope.capture.loops.compiling import compiled

INPUTS = "void(float32[:,:,::1], float32, float32[:,::1], float32[:,::1], int64[:,:,::1], int64, int64)"

ENTRIES, LOST_IN_TENSOR, LOST_IN_TOKEN = range(3)
"""The places of a token's numbers in the first axis of `counts`."""

MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
"""The bits of |x|, and those of infinity: the bits of NaN are larger. Without their sign, bits of floats are in order,
and the processor compares many whole numbers at once."""


@njit
@no_type_check
def _bound(number):
    """The bits up to which a size is at most `number`; -1, which no size has, where it is NaN."""
    bits = np.float32(number).view(np.int32)
    return bits if bits <= INFINITE else np.int32(-1)


@compiled(INPUTS)
@no_type_check
def read_inputs(x, divisor, of_tokens, of_features, counts, begin, step):
    """Reads every token of some sequences twice, the second time from cache.

    Args:
        x: (sequence, token, feature).
        divisor: an entry rounds to 0 where it is at most the largest over this.
        of_tokens, of_features: the largest |x| of each token and of each feature, NaN where an entry is; (sequence,
            token) and (sequence, feature).
        counts: (place, sequence, token): entries other than 0; those lost with one scale for the whole sequence, and
            with one for the token.
        begin, step: the sequences that this call takes: begin, begin + step, and so on.
    """
    sequences, tokens, width = x.shape
    largest = np.empty(width, np.int32)
    for sequence in range(begin, sequences, step):
        largest[:] = 0
        for token in range(tokens):
            bits, peak, entries = x[sequence, token].view(np.int32), np.int32(0), np.int32(0)
            for feature in range(width):
                size = np.int32(bits[feature] & MAGNITUDE)
                peak = max(peak, size)
                largest[feature] = max(largest[feature], size)
                entries += np.int32(size > 0) & np.int32(size <= INFINITE)
            of_tokens[sequence, token] = np.int32(peak).view(np.float32)
            counts[ENTRIES, sequence, token] = entries
        whole = _bound(np.int32(largest.max()).view(np.float32) / divisor)
        for feature in range(width):
            of_features[sequence, feature] = np.int32(largest[feature]).view(np.float32)
        for token in range(tokens):
            bits, token_bound = x[sequence, token].view(np.int32), _bound(of_tokens[sequence, token] / divisor)
            in_tensor, in_token = np.int32(0), np.int32(0)
            for feature in range(width):
                size = np.int32(bits[feature] & MAGNITUDE)
                in_tensor += np.int32(size <= whole)
                in_token += np.int32(size <= token_bound)
            zeros = width - counts[ENTRIES, sequence, token]  # where there is a bound, no entry is NaN
            counts[LOST_IN_TENSOR, sequence, token] = in_tensor - zeros if whole >= 0 else 0
            counts[LOST_IN_TOKEN, sequence, token] = in_token - zeros if token_bound >= 0 else 0
