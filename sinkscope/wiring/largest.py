"""The largest eigenvalue alone, in float64.

Large matrices on a CPU go to ARPACK, which asks only for products with a vector and stops when the eigenvalue has all
its digits: a quarter of the time of all eigenvalues from 256 on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_float64

LARGE = 192
"""The size from which ARPACK is faster."""


def largest_eigenvalue(symmetric: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """The largest eigenvalue of each symmetric matrix without negative ones; NaN for a matrix with NaN or infinity."""
    exact = as_float64(symmetric)
    finite = exact.isfinite().all(-1).all(-1)
    exact = torch.where(finite[..., None, None], exact, 0.0)  # LAPACK refuses NaN
    if _large(exact, exact.shape[-1]):
        found = _each(exact, lambda matrix: lambda vector: matrix @ vector)
    else:
        found = torch.linalg.eigvalsh(exact)[..., -1]
    return torch.where(finite, found, torch.nan)


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
    found = [_by_arpack(product(each), each.shape[-1]) for each in flat]
    return torch.tensor(found, dtype=torch.float64).view(matrices.shape[:-2])


def _by_arpack(product: Product, size: int) -> float:
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # a tenth of a second

    start = np.random.default_rng(0).standard_normal(size)  # always the same: two scans give equal bytes
    try:
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        return float(eigsh(operator, k=1, which="LA", v0=start, tol=0, return_eigenvectors=False)[0])
    except ArpackError:  # no convergence, or a matrix of zeros, which has no direction to start from
        return float(np.linalg.eigvalsh(np.stack([product(row) for row in np.eye(size)]))[-1])
