"""The compiled loop over the tokens of the residual stream and what the norm before attention makes of them."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from sinkscope.capture.loops.compiling import ROWS, compiled, helper, row

NORMALISED = (
    f"void({ROWS}, {ROWS}, float32[::1], float32[::1], boolean, boolean, float32[:,:,::1], float32[:,:,::1],"
    " float32[:,:,::1], float64[:,::1], float64[:,::1], int64, int64)"
)

SPREAD, JOINT, X_SPREAD, MEAN_SQUARE, X_MEAN_SQUARE, X_UNIT_SQUARE = range(6)
"""The places of a sequence's moments in the last axis of `moments`."""

FACTOR, SHIFT = range(2)
"""The places of a token's numbers in the first axis of `affine`."""


@helper
@no_type_check
def _fit(line, read, gain, bias, centred):
    """The numbers (a, b) with which a (x - b) gain + bias is closest to what the norm made of x."""
    shift, product, square = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    if centred:
        for channel in range(len(line)):
            shift += line[channel]
        shift /= np.float32(len(line))
    for channel in range(len(line)):
        shaped = gain[channel] * (line[channel] - shift)
        product += (read[channel] - bias[channel]) * shaped
        square += shaped * shaped
    return product / (square if square > 0 else np.float32(1.0)), shift


@helper
@no_type_check
def _mean(total, count, mean):
    """Writes the mean of each channel and returns its squared norm."""
    square = 0.0
    for channel in range(len(total)):
        mean[channel] = total[channel] / count
        square += (total[channel] / count) * (total[channel] / count)
    return square


@compiled(NORMALISED)
@no_type_check
def read_normalised(
    x, z, gain, bias, centred, absent, affine, normalised, around, sizes, moments, begin, step
):  # fmt: skip
    """Reads every token of some sequences twice, the second time from cache.

    Args:
        x, z: x_i and what attention reads of it, gain * n_i + bias.
        gain, bias, centred, absent: those of an InputNorm.
        affine: (a, b) with n_i = a_i (x_i - b_i), (place, sequence, token).
        normalised: n_i, (sequence, token, channel).
        around: x_i - xbar, and behind the last token xbar, (sequence, token + 1, channel).
        sizes: |x_i|^2, (sequence, token).
        moments: the means over tokens of |n_i - nbar|^2, (x_i - xbar).(n_i - nbar) and |x_i - xbar|^2; then |nbar|^2
            and |xbar|^2; then |sum x_i / |x_i||^2, without vectors of 0. (sequence, place).
        begin, step: the sequences that this call takes: begin, begin + step, and so on.
    """
    sequences, tokens, width = normalised.shape
    mean = np.empty(width, np.float32)
    for sequence in range(begin, sequences, step):
        total, x_total, units = np.zeros(width), np.zeros(width), np.zeros(width)
        for token in range(tokens):
            line, normed = row(x, sequence, token), normalised[sequence, token]
            factor, shift = np.float32(1.0), np.float32(0.0)
            if not absent:
                factor, shift = _fit(line, row(z, sequence, token), gain, bias, centred)
            affine[FACTOR, sequence, token], affine[SHIFT, sequence, token] = factor, shift
            size = 0.0
            for channel in range(width):
                value = factor * (line[channel] - shift)
                normed[channel] = value
                total[channel] += value
                x_total[channel] += line[channel]
                size += float(line[channel]) * float(line[channel])
            sizes[sequence, token] = size
            inverse = 1.0 / math.sqrt(size) if size > 0 else 0.0
            for channel in range(width):
                units[channel] += inverse * line[channel]
        x_mean, facts = around[sequence, tokens], moments[sequence]
        facts[MEAN_SQUARE], facts[X_MEAN_SQUARE] = _mean(total, tokens, mean), _mean(x_total, tokens, x_mean)
        facts[SPREAD], facts[JOINT], facts[X_SPREAD], facts[X_UNIT_SQUARE] = 0.0, 0.0, 0.0, (units * units).sum()
        for token in range(tokens):
            line, normed, apart = row(x, sequence, token), normalised[sequence, token], around[sequence, token]
            spread, joint, x_spread = np.float32(0.0), np.float32(0.0), np.float32(0.0)
            for channel in range(width):
                here, there = normed[channel] - mean[channel], line[channel] - x_mean[channel]
                apart[channel] = there
                spread += here * here
                joint += here * there
                x_spread += there * there
            facts[SPREAD] += spread / tokens
            facts[JOINT] += joint / tokens
            facts[X_SPREAD] += x_spread / tokens
