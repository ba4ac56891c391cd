"""Mixes of value vectors, what W_O makes of them, float64 sums over tokens and channels, and the largest eigenvalue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.capture.precision import as_float64

Tokens = Float[Tensor, "token channel"]
Mixed = Float[Tensor, "group token vdim"]
Written = Float[Tensor, "head token rank"]
Rows = Float[Tensor, "head token"]
"""Numbers of each head and token, float64."""

BLOCK = 16
"""Rows that are summed at once."""


@dataclass
class OutputWeights:
    """W_O^hT of every head, and what follows from it, computed once for all sequences of a view.

    `factors`: R_h with |R_h y| = |W_O^h y|, where they are known.
    """

    slices: Float[Tensor, "head vdim channel"]
    factors: Float[Tensor, "head rank vdim"] | None = None

    @cached_property
    def roots(self) -> Float[Tensor, "head rank vdim"]:
        """R_h: gives norms and spectra after W_O without a T x D tensor."""
        return torch.linalg.qr(self.slices.mT, mode="r").R if self.factors is None else self.factors

    @cached_property
    def sums(self) -> Float[Tensor, "head vdim"]:
        """W_O^hT of the vector of ones."""
        return self.slices.sum(-1)

    def read(self, tokens: Float[Tensor, "*batch token channel"]) -> Float[Tensor, "*batch head token vdim"]:
        """W_O^hT t of every token t."""
        heads = self.slices.shape[0]
        return (tokens @ self.slices.flatten(0, 1).mT).unflatten(-1, (heads, -1)).transpose(-3, -2)

    def through(self, mixed: Mixed) -> Written:
        """R_h y_i, which has the same norms as W_O^h y_i and the same angles between tokens."""
        return (mixed.unsqueeze(1) @ self.roots.unflatten(0, (len(mixed), -1)).mT).flatten(0, 1)


def squares(rows: Float[Tensor, "*rows channel"]) -> Float[Tensor, "*rows"]:
    """The squared norm of each row, float64."""
    return as_float64(torch.linalg.vector_norm(rows, dim=-1)).square()


def dots(left: Float[Tensor, "head token vdim"], right: Mixed) -> Rows:
    """l_i.r_i of every head and token; the heads of a group share its rows."""
    return as_float64((left.unflatten(0, (len(right), -1)) * right.unsqueeze(1)).sum(-1)).flatten(0, 1)


def share(vectors: Float[Tensor, "head vdim"], mixed: Mixed) -> Float[Tensor, "head token"]:
    """v.y_i of every head's vector v and its group's rows y."""
    return (vectors.unflatten(0, (len(mixed), -1)) @ mixed.mT).flatten(0, 1)


def running_mean(rows: Mixed) -> Mixed:
    """The mean of each row and those before it.

    Sums go block by block: torch's own cumsum walks down each column apart, which takes a CPU three times as long.
    """
    count = rows.shape[1]
    blocks = pad(rows, (0, 0, 0, -count % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = rows.new_ones(BLOCK, BLOCK).tril() @ blocks
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    steps = torch.arange(1, count + 1, device=rows.device, dtype=rows.dtype)
    return sums.flatten(1, 2)[:, :count].div_(steps[:, None])


# The largest eigenvalue alone, in float64.
#
# Large matrices on a CPU go to ARPACK, which asks only for products with a vector and stops when the eigenvalue has all
# its digits: a quarter of the time of all eigenvalues from 256 on.


LARGE = 192
"""The size from which ARPACK is faster."""


def largest_eigenvalue(symmetric: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """The largest eigenvalue of each symmetric matrix without negative ones; NaN for a matrix with NaN or infinity."""
    exact = as_float64(symmetric)
    finite = exact.isfinite().all(-1).all(-1)
    exact = torch.where(finite[..., None, None], exact, 0.0)  # LAPACK refuses NaN
    if _large(exact, exact.shape[-1]):
        largest = _each(exact, lambda matrix: lambda vector: matrix @ vector)
    else:
        largest = torch.linalg.eigvalsh(exact)[..., -1]
    return torch.where(finite, largest, torch.nan)


def largest_square(rows: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    """|A|_2^2 of each matrix A, the square of its largest singular value; NaN for one with NaN or infinity."""
    exact = as_float64(rows)
    tall = exact if exact.shape[-2] >= exact.shape[-1] else exact.mT
    if not _large(tall, tall.shape[-1]) or not tall.isfinite().all():
        return largest_eigenvalue(tall.mT @ tall)  # float64: squaring loses no digits of the largest
    return _each(tall, lambda matrix: lambda vector: matrix.T @ (matrix @ vector))


Product = Callable[[np.ndarray], np.ndarray]


def _large(matrices: Tensor, size: int) -> bool:
    return matrices.device.type == "cpu" and size >= LARGE


def _each(matrices: Float[Tensor, "*batch row n"], product: Callable[[np.ndarray], Product]) -> Tensor:
    flat = matrices.flatten(0, -3).numpy() if matrices.dim() > 2 else matrices[None].numpy()
    # Tokens that are equal leave zeros, which have no direction for ARPACK to start from, and are slow for LAPACK.
    eigenvalues = [_by_arpack(product(matrix), matrix.shape[-1]) if matrix.any() else 0.0 for matrix in flat]
    return torch.tensor(eigenvalues, dtype=torch.float64).view(matrices.shape[:-2])


def _by_arpack(product: Product, size: int) -> float:
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # a tenth of a second

    start = np.random.default_rng(0).standard_normal(size)  # always the same: two scans give equal bytes
    try:
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        return float(eigsh(operator, k=1, which="LA", v0=start, tol=0, return_eigenvectors=False)[0])
    except ArpackError:  # no convergence
        return float(np.linalg.eigvalsh(np.stack([product(row) for row in np.eye(size)]))[-1])
