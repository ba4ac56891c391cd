"""Two statistics that libraries give slowly or inexactly, made exact and cheap: a median, a spectrum's entropy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

HEAVY_TOKENS = 8
COARSE_BITS = 18
"""Leaves the exponent and 5 bits of the mantissa: buckets 3 % wide."""


def median_abs(x: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Median of |x| of each row, the mean of the two middle values for an even count (numpy's rule); NaN if any is.

    The bits of a non-negative float32 order as integers do: a histogram of their upper bits finds the few elements
    around the middle, and only those are sorted. Exact, and several times faster than selecting among all.
    """
    bits = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    middles = torch.stack([_middle(row) for row in bits]).view(torch.float32).to(x.dtype)
    return torch.where(torch.isnan(x).any(-1), torch.nan, middles.mean(-1))


def _middle(bits: Int[Tensor, " element"]) -> Int[Tensor, " two"]:
    """The two middle elements (the same one twice for an odd count)."""
    ranks = torch.tensor([(len(bits) - 1) // 2, len(bits) // 2], device=bits.device)
    coarse = bits >> COARSE_BITS
    ends = torch.bincount(coarse).cumsum(0)
    low, high = torch.searchsorted(ends, ranks, right=True)
    near = bits[(coarse >= low) & (coarse <= high)].sort().values
    skipped = torch.where(low > 0, ends[low - 1], 0)
    return near[ranks - skipped]


def spectrum_entropy(x: Float[Tensor, "batch token channel"]) -> Float[Tensor, " batch"]:
    """Entropy in nats of the squared singular values of each x over their sum, from the smaller Gram matrix.

    Eigenvalues are taken in float64. Products are float32; the few tokens whose norm dwarfs the rest (massive
    activations, sinks) would drown the others' rounding, so the heaviest join the channel Gram matrix in float64.
    """
    tokens, channels = x.shape[1:]
    if tokens <= channels:
        gram = torch.bmm(x, x.mT).double()
    else:
        heavy = torch.linalg.vector_norm(x, dim=-1).topk(min(HEAVY_TOKENS, tokens), dim=-1).indices
        rows = torch.arange(len(x), device=x.device)[:, None]
        light = x.clone()
        light[rows, heavy] = 0.0
        outliers = x[rows, heavy].double()
        gram = torch.bmm(light.mT, light).double() + torch.bmm(outliers.mT, outliers)
    finite = gram.isfinite().flatten(1).all(-1)  # LAPACK refuses the rest with an error of its own
    values = eigenvalues(torch.where(finite[:, None, None], gram, 0.0)).clamp(min=0.0)
    share = values / values.sum(-1, keepdim=True)
    entropy = torch.special.entr(share).sum(-1)
    return torch.where(finite, entropy, torch.nan).to(x.dtype)


def eigenvalues(matrices: Float[Tensor, "batch n n"]) -> Float[Tensor, "batch n"]:
    """Eigenvalues of symmetric matrices, ascending. On a CPU each matrix has a thread of its own: LAPACK's reduction to
    tridiagonal form gains nothing from more, and keeps the others spinning."""
    if matrices.device.type != "cpu":
        return torch.linalg.eigvalsh(matrices)
    # torch's LAPACK, not numpy's: two libraries' thread pools on the same cores slow each other down.
    return torch.stack(list(_single_threads(torch.get_num_threads()).map(torch.linalg.eigvalsh, matrices)))


@cache
def _single_threads(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "sinkscope-eigenvalues", initializer=lambda: torch.set_num_threads(1))
