"""The compiled loop over the tokens that heads have added to: their norms, and the sum of their unit vectors."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from sinkscope.capture.loops.compiling import compiled

MIXES = (
    "void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], float64[::1], float64[:,::1], float64[::1], int64,"
    " int64)"
)


@compiled(MIXES)
@no_type_check
def add_mixes(read, mixed, out, squares, weights, totals, begin, step):
    """Reads the vectors x_i + W_O y_i of some heads once, without forming them.

    Args:
        read: W_O^T (x_i - xbar), and behind the last token W_O^T xbar; (head, token + 1, vdim).
        mixed: y_i, (group, token, vdim).
        out: R y_i, which is as long as W_O y_i and at the same angles; (head, token, rank).
        squares: |x_i|^2, (token).
        weights: w_i = 1 / |x_i + W_O y_i|, 0 for a vector of 0; (head, token).
        totals: |sum w_i (x_i + W_O y_i)|^2 - |sum w_i x_i|^2, (head).
        begin, step: the heads that this call takes: begin, begin + step, and so on.
    """
    heads, tokens, rank = out.shape
    groups, _, width = mixed.shape
    for head in range(begin, heads, step):
        rows, mean = mixed[head // (heads // groups)], read[head, tokens]
        moved, seen, written, weighed = np.zeros(width), np.zeros(width), np.zeros(rank), 0.0
        for token in range(tokens):
            x, y, own = read[head, token], rows[token], out[head, token]
            around, along, square = np.float32(0.0), np.float32(0.0), np.float32(0.0)
            for channel in range(width):
                around += x[channel] * y[channel]
                along += mean[channel] * y[channel]
            for channel in range(rank):
                square += own[channel] * own[channel]
            size = squares[token] + 2 * (float(around) + float(along)) + square
            weight = 1 / math.sqrt(size) if size > 0 else 0.0
            weights[head, token] = weight
            weighed += weight
            for channel in range(width):
                moved[channel] += weight * y[channel]
                seen[channel] += weight * x[channel]
            for channel in range(rank):
                written[channel] += weight * own[channel]
        total = 0.0
        for channel in range(width):
            total += 2 * (seen[channel] + weighed * mean[channel]) * moved[channel]
        for channel in range(rank):
            total += written[channel] * written[channel]
        totals[head] = total
