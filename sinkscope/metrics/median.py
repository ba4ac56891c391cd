"""The exact median of |x|, faster than selecting among all elements."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture import loops

MANY_ROWS = 8
"""With at least this many rows, an accelerator selects all their medians at once."""

COARSE_BITS = 18
"""Leaves the exponent and 5 bits of the mantissa: buckets 3 % wide."""


def median_abs(x: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Median of |x| for each row: the mean of the two middle values for an even count (numpy's rule), NaN if any x is.

    The bits of non-negative float32 numbers sort like integers: a histogram of their upper bits finds the few elements
    around the middle, and only among those is anything compared. A compiled loop does so on a CPU (or numpy selects,
    with vector instructions that torch lacks), torch on an accelerator. That selects in many rows at once instead,
    because it would wait for the host after every row.
    """
    loop = loops.loops_over("vectors", x, x.shape[-1])
    if loop is not None:
        medians = torch.empty(len(x))
        loops.run(loop.read_medians, loops.in_rows(x), medians.numpy())
        return medians.to(x.dtype)
    if x.device.type == "cpu":
        return _partitioned(x.float().abs()).to(x.dtype)
    if len(x) >= MANY_ROWS:
        return _selected(x.float().abs()).to(x.dtype)
    bits = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    middles = torch.stack([_middle(row) for row in bits]).view(torch.float32).to(x.dtype)
    return torch.where(torch.isnan(x).any(-1), torch.nan, middles.mean(-1))


def _partitioned(sizes: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Medians of rows on the CPU; the sizes are left in another order."""
    count, middle = sizes.shape[-1], sizes.shape[-1] // 2
    missing = sizes.amax(-1).isnan()
    sizes.numpy().partition(middle, axis=-1)  # in place: no smaller element follows the middle one
    upper = sizes[:, middle]
    medians = upper if count % 2 else (sizes[:, :middle].amax(-1) + upper) / 2
    return medians.masked_fill(missing, torch.nan)


def _selected(sizes: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Medians of all rows at once. torch's median is the lower of the two middle elements; the upper one is either
    equal to it or the next larger element."""
    lower = sizes.median(-1).values
    if sizes.shape[-1] % 2:
        return lower
    larger = sizes > lower[:, None]
    above = sizes.masked_fill(~larger, torch.inf).amin(-1)
    within = sizes.shape[-1] - larger.sum(-1)
    return (lower + torch.where(within > sizes.shape[-1] // 2, lower, above)) / 2


def _middle(bits: Int[Tensor, " element"]) -> Int[Tensor, " two"]:
    """The bits of the two middle elements (the same one twice for an odd count)."""
    ranks = torch.tensor([(len(bits) - 1) // 2, len(bits) // 2], device=bits.device)
    coarse = bits >> COARSE_BITS
    ends = torch.bincount(coarse).cumsum(0)
    low, high = torch.searchsorted(ends, ranks, right=True)
    near = bits[(coarse >= low) & (coarse <= high)].sort().values
    skipped = torch.where(low > 0, ends[low - 1], 0)
    return near[ranks - skipped]
