"""The compiled loop over what the heads of one sequence add to its tokens: norms, sums of unit vectors, and moments."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from sinkscope.capture.loops.compiling import ROWS, compiled, helper, row

MIXES = (
    f"void({ROWS}, {ROWS}, {ROWS}, {ROWS}, {ROWS}, int64, boolean, float64[::1], float64[:,:,::1], float64[:,::1],"
    " float64[:,:,::1], float64[:,::1], float64[:,::1], float64[::1], int64, int64)"
)

IDENTITY, UNIFORM, ATTENTION = range(3)
"""The places of the mixes in the first axis of `weights` and `totals`."""

FEW = 16
"""Tokens that are summed in float32, before the sum is added to one in float64."""

AROUND, ALONG = range(2)
"""The places of a token's products in the first axis of `products`."""


@helper
@no_type_check
def _products(x, mean, y):
    around, along = np.float32(0.0), np.float32(0.0)
    for channel in range(len(y)):
        around += x[channel] * y[channel]
        along += mean[channel] * y[channel]
    return float(around), float(along)


@helper
@no_type_check
def _weigh(x, y, out, size, moved, seen, written):
    """Adds one vector x + W_O y, whose squared norm is `size` + |out|^2, by its unit vector; returns its inverse
    norm."""
    square = np.float32(0.0)
    for channel in range(len(out)):
        square += out[channel] * out[channel]
    size += square
    weight = 1 / math.sqrt(size) if size > 0 else 0.0
    share = np.float32(weight)
    for channel in range(len(y)):
        moved[channel] += share * y[channel]
        seen[channel] += share * x[channel]
    for channel in range(len(out)):
        written[channel] += share * out[channel]
    return weight


@helper
@no_type_check
def _add(total, line):
    for channel in range(len(line)):
        total[channel] += line[channel]


@helper
@no_type_check
def _drain(sums, totals):
    """Adds float32 sums of a few tokens to their float64 totals, and begins them anew."""
    for mix in range(len(sums)):
        _add(totals[mix], sums[mix])
        sums[mix] = 0.0


@helper
@no_type_check
def _divide(total, count, mean):
    share = 1.0 / count
    for channel in range(len(mean)):
        mean[channel] = total[channel] * share


@helper
@no_type_check
def _less_first(total, first, count, mean):
    """The mean of all rows but the first, from the sum of all."""
    for channel in range(len(total)):
        mean[channel] = (total[channel] - first[channel]) / count


@helper
@no_type_check
def _spread(rows, head, tokens, mean):
    """The mean squared distance of all rows but the first from `mean`."""
    spread = 0.0
    for token in range(tokens):
        vector, square = row(rows, head, token + 1), np.float32(0.0)
        for channel in range(len(mean)):
            square += (vector[channel] - mean[channel]) * (vector[channel] - mean[channel])
        spread += square
    return spread / tokens


@helper
@no_type_check
def _total(moved, seen, written, weighed, mean):
    """What the heads change in the squared norm of the sum of the unit vectors."""
    total = 0.0
    for channel in range(len(moved)):
        total += 2 * (seen[channel] + weighed * mean[channel]) * moved[channel]
    for channel in range(len(written)):
        total += written[channel] * written[channel]
    return total


@compiled(MIXES)
@no_type_check
def add_mixes(
    read, values, out, attended, attended_out, repeat, causal, squares, weights, totals, products, values_mean,
    out_mean, out_spread, begin, step,
):  # fmt: skip
    """Reads the vectors x_i + W_O y_i of some heads, i >= 1, for mixes y of values u_j, without forming them: u_i
    itself, the mean of u_j over j <= i (over all j unless `causal`), and where it is known what the head attends.

    Args:
        read: W_O^T (x_i - xbar) of tokens i >= 1, and behind the last token W_O^T xbar.
        values: u_j of each group, of token 0 too.
        out: R u_j of each head, which is as long as W_O u_j and at the same angles; of token 0 too.
        attended, attended_out: the mix that each head attends and R of it, of tokens i >= 1; not read where `weights`
            has two mixes.
        repeat: heads that share the values of a group; they are adjacent.
        squares: |x_i|^2, (token).
        weights: w_i = 1 / |x_i + W_O y_i|, 0 for a vector of 0; (mix, head, token).
        totals: |sum w_i (x_i + W_O y_i)|^2 - |sum w_i x_i|^2, (mix, head).
        products: (x_i - xbar).W_O u_i and xbar.W_O u_i, (place, head, token).
        values_mean, out_mean: the means of u_i and R u_i, i >= 1; (head, vdim) and (head, rank).
        out_spread: the mean of |R u_i - out_mean|^2, i >= 1; (head).
        begin, step: the heads that this call takes: begin, begin + step, and so on.
    """
    mixes, heads, tokens = weights.shape
    width, rank = values[3], out[3]
    mixed, mixed_out = np.empty(width, np.float32), np.empty(rank, np.float32)
    for head in range(begin, heads, step):
        group, mean = head // repeat, row(read, head, tokens)
        moved, seen, written = np.zeros((mixes, width)), np.zeros((mixes, width)), np.zeros((mixes, rank))
        few_moved, few_seen = np.zeros((mixes, width), np.float32), np.zeros((mixes, width), np.float32)
        few_written, weighed = np.zeros((mixes, rank), np.float32), np.zeros(mixes)
        value_sum, out_sum = np.zeros(width), np.zeros(rank)
        for token in range(1 if causal else tokens + 1):
            _add(value_sum, row(values, group, token))
            _add(out_sum, row(out, head, token))
        for token in range(tokens):
            x = row(read, head, token)
            for mix in range(mixes):
                if mix == IDENTITY:
                    y, y_out = row(values, group, token + 1), row(out, head, token + 1)
                elif mix == ATTENTION:
                    y, y_out = row(attended, head, token), row(attended_out, head, token)
                else:
                    if causal:
                        _add(value_sum, row(values, group, token + 1))
                        _add(out_sum, row(out, head, token + 1))
                    seen_so_far = token + 2 if causal else tokens + 1
                    _divide(value_sum, seen_so_far, mixed)
                    _divide(out_sum, seen_so_far, mixed_out)
                    y, y_out = mixed, mixed_out
                around, along = _products(x, mean, y)
                size = squares[token] + 2 * (around + along)
                weight = _weigh(x, y, y_out, size, few_moved[mix], few_seen[mix], few_written[mix])
                weights[mix, head, token] = weight
                weighed[mix] += weight
                if mix == IDENTITY:
                    products[AROUND, head, token], products[ALONG, head, token] = around, along
            if token % FEW == FEW - 1 or token == tokens - 1:
                _drain(few_moved, moved)
                _drain(few_seen, seen)
                _drain(few_written, written)
        for mix in range(mixes):
            totals[mix, head] = _total(moved[mix], seen[mix], written[mix], weighed[mix], mean)
        _less_first(value_sum, row(values, group, 0), tokens, values_mean[head])
        _less_first(out_sum, row(out, head, 0), tokens, out_mean[head])
        _divide(out_mean[head], 1, mixed_out)
        out_spread[head] = _spread(out, head, tokens, mixed_out)
