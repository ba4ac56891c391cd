"""The largest eigenvalue of symmetric matrices, without the others."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

SMALL = 96
"""Matrices with at most so many rows are solved whole, which is as fast."""

STEPS, CHECKED = 80, 8
"""The most Lanczos steps, and the steps between two looks at the residual."""

TOLERANCE = 1e-9
"""A value is accepted where its residual |A y - t y| is at most this times t: an eigenvalue then lies so near to t, and
the error is about the square of that where eigenvalues are apart."""


def largest_eigenvalue(matrices: Float[Tensor, "batch n n"]) -> Float[Tensor, " batch"]:
    """The largest eigenvalue of each positive semidefinite float64 matrix, by Lanczos steps from a random vector.

    Every step is orthogonalised against all before it. Where STEPS of them do not reach TOLERANCE, all eigenvalues are
    computed.
    """
    count, size = matrices.shape[:2]
    if size <= SMALL or not matrices.diagonal(0, 1, 2).isfinite().all():
        return torch.linalg.eigvalsh(matrices)[:, -1]
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrices)
    basis = matrices.new_zeros(count, STEPS + 1, size)
    small = matrices.new_zeros(count, STEPS, STEPS)
    basis[:, 0] = start / start.norm()
    for step in range(STEPS):
        following = torch.bmm(matrices, basis[:, step, :, None])
        known = basis[:, : step + 1]
        for _ in range(2):  # the second time takes what rounding left
            shares = torch.bmm(known, following)
            small[:, : step + 1, step] += shares[..., 0]
            following.baddbmm_(known.mT, shares, alpha=-1)
        length = torch.linalg.vector_norm(following, dim=(1, 2))
        if (step + 1) % CHECKED == 0:
            values, vectors = torch.linalg.eigh(small[:, : step + 1, : step + 1], UPLO="U")
            if (length * vectors[:, -1, -1].abs() <= TOLERANCE * values[:, -1]).all():
                return values[:, -1]
        basis[:, step + 1] = following[..., 0] / torch.where(length > 0, length, 1.0)[:, None]
    return torch.linalg.eigvalsh(matrices)[:, -1]
