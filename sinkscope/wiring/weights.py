"""What can be said of a head's bilinear form from its weights, and by what number the model multiplies it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_float64
from sinkscope.wiring.largest import largest_eigenvalue
from sinkscope.wiring.linear_maps import FIT, Projection

SAME_RATIO = 1e-3
"""Two tokens are multiplied by the same number where the numbers differ by less than this share."""


def stable_rank(
    left: Float[Tensor, "head channel dim"], right: Float[Tensor, "group channel dim"]
) -> Float[Tensor, " head"]:
    """|M|_F^2 / |M|_2^2 of M = left_h right_g^T, from d x d matrices; NaN where M is 0. The heads of a group are
    adjacent.

    The squared singular values of M are the eigenvalues of R left^T left R^T with right = Q R. Squaring costs digits of
    the small ones, which neither the trace nor the largest needs.
    """
    grams = as_float64(left).mT @ as_float64(left)
    factors = torch.linalg.qr(as_float64(right), mode="r").R.repeat_interleave(len(left) // len(right), dim=0)
    squared = factors @ grams @ factors.mT
    largest = largest_eigenvalue(squared)
    return squared.diagonal(dim1=-2, dim2=-1).sum(-1) / torch.where(largest > 0, largest, torch.nan)


def weight_cost(
    query: Float[Tensor, "head dim channel"], key: Float[Tensor, "group dim channel"]
) -> Float[Tensor, " head"]:
    """(|W_Q^h|_F^2 + |W_K^g|_F^2) / 2 of every head; it is at least the nuclear norm of W_Q^hT R W_K^g for every
    rotation R. The heads of a group are adjacent."""
    keys = as_float64(key).square().sum((1, 2)).repeat_interleave(len(query) // len(key))
    return (as_float64(query).square().sum((1, 2)) + keys) / 2


def one_factor(projection: Projection, signal: Float[Tensor, "batch head token dim"], z: Tensor) -> float | None:
    """The one number by which the model multiplies the projection of z to make `signal`, up to a rotation.

    None where that number is another one for each token, as behind a norm over each head.
    """
    made = torch.einsum("btc,hdc->bhtd", as_float64(z), projection.weight) + projection.constant[:, None]
    found = torch.linalg.vector_norm(as_float64(signal), dim=-1)
    ratio = (found / torch.linalg.vector_norm(made, dim=-1)).flatten()
    ratio = ratio[ratio.isfinite()]
    if not len(ratio):
        return None
    typical = ratio.median()
    bound = max(FIT.get(signal.dtype, FIT[torch.float32]), SAME_RATIO, projection.fit)
    return float(typical) if bool(((ratio / typical - 1).abs() < bound).all()) else None
