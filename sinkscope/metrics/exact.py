"""Two statistics that libraries give slowly or inexactly, made exact and cheap: a median, a spectrum's entropy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

HEAVY_TOKENS = 8
STRIPS = 4
"""Of a Gram matrix: five eighths of its products are formed, in pieces still large enough for a fast product."""

WAITING_BYTES = 256 * 2**20
"""Matrices that wait for others take no more."""

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
    """Entropy in nats of the squared singular values of each x over their sum. Eigenvalues are taken in float64."""
    return SpectrumEntropy.of(x).tensor()


def gram_matrix(x: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch n n"]:
    """The lower triangle (the upper is not filled) of the smaller Gram matrix of each x, float64; all NaN where x is
    not finite.

    Products are float32; the few tokens whose norm dwarfs the rest (massive activations, sinks) would drown the
    others' rounding, so the heaviest join the channel Gram matrix in float64.
    """
    tokens, channels = x.shape[1:]
    if tokens <= channels:
        gram = _lower_products(x)
    else:
        heavy = torch.linalg.vector_norm(x, dim=-1).topk(min(HEAVY_TOKENS, tokens), dim=-1).indices
        rows = torch.arange(len(x), device=x.device)[:, None]
        light = x.clone()
        light[rows, heavy] = 0.0
        outliers = x[rows, heavy].double()
        gram = _lower_products(light.mT).baddbmm_(outliers.mT, outliers)
    finite = gram.isfinite().flatten(1).all(-1)
    return torch.where(finite[:, None, None], gram, torch.nan)


def _lower_products(rows: Float[Tensor, "batch n m"]) -> Float[Tensor, "batch n n"]:
    """rows @ rows.mT at and below the diagonal, a strip at a time: LAPACK reads no more of a symmetric matrix."""
    count = rows.shape[1]
    gram = torch.zeros(len(rows), count, count, dtype=torch.float64, device=rows.device)
    step = max(1, -(-count // STRIPS))
    for start in range(0, count, step):
        stop = min(start + step, count)
        gram[:, start:stop, :stop] = torch.bmm(rows[:, start:stop], rows[:, :stop].mT)
    return gram


def _entropy(values: Float[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
    kept = values.clamp(min=0.0)
    return torch.special.entr(kept / kept.sum(-1, keepdim=True)).sum(-1)


def eigenvalues(matrices: Float[Tensor, "batch n n"]) -> Float[Tensor, "batch n"]:
    """Eigenvalues of symmetric matrices, ascending; NaN for a matrix with NaN, which LAPACK refuses with an error."""
    known = matrices.isfinite().flatten(1).all(-1)
    filled = torch.where(known[:, None, None], matrices, 0.0)
    values = torch.linalg.eigvalsh(filled) if filled.device.type != "cpu" else torch.stack(_one_thread_each([*filled]))
    return torch.where(known[:, None], values, torch.nan)


def _one_thread_each(matrices: list[Tensor]) -> list[Tensor]:
    """Each matrix has a thread of its own: LAPACK's reduction to tridiagonal form gains nothing from more, and keeps
    the others spinning. torch's LAPACK, not numpy's: two libraries' thread pools slow each other down."""
    return list(_single_threads(torch.get_num_threads()).map(torch.linalg.eigvalsh, matrices))


@dataclass
class SpectrumEntropy:
    """`spectrum_entropy` of one x whose eigenvalues are still to be computed: several are cheaper together.

    On a CPU one matrix alone would leave all threads but one idle, and long sequences come one at a time.
    """

    gram: Tensor | None
    dtype: torch.dtype
    value: Tensor | None = None

    @classmethod
    def of(cls, x: Float[Tensor, "batch token channel"]) -> SpectrumEntropy:
        return cls(gram_matrix(x), x.dtype)

    def tensor(self) -> Tensor:
        """The entropies, [batch]; computed now if they were not."""
        if self.value is None:
            solve([self])
        assert self.value is not None
        return self.value


def full(waiting: list[SpectrumEntropy]) -> bool:
    """Whether so many wait that every thread has its matrix, or memory says stop; an accelerator waits for none."""
    grams = [one.gram for one in waiting if one.gram is not None]
    if any(gram.device.type != "cpu" for gram in grams):
        return True
    count, held = sum(map(len, grams)), sum(gram.nbytes for gram in grams)
    return count >= torch.get_num_threads() or held >= WAITING_BYTES


def solve(waiting: list[SpectrumEntropy]) -> None:
    """Computes them, those of one size together, and lets go of their matrices."""
    by_size: dict[int, list[tuple[SpectrumEntropy, Tensor]]] = {}
    for one in waiting:
        if one.gram is not None:
            by_size.setdefault(one.gram.shape[-1], []).append((one, one.gram))
    for group in by_size.values():
        values = _entropy(eigenvalues(torch.cat([gram for _, gram in group])))
        for (one, _), part in zip(group, values.split([len(gram) for _, gram in group]), strict=True):
            one.value, one.gram = part.to(one.dtype), None


@cache
def _single_threads(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "sinkscope-eigenvalues", initializer=lambda: torch.set_num_threads(1))
