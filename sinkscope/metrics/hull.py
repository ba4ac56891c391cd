"""How far a point lies from the convex hull of others, in float64."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_float64

INSIDE = 1e-6
"""A distance below this share of the points' size is rounding, and counts as 0."""


def hull_distance(points: Float[Tensor, "point channel"]) -> float:
    """The distance of the origin from the convex hull of the points; 0 where it lies inside; NaN for a point that is
    not finite.

    The nearest point is found by non-negative least squares: the weights a >= 0 with the least |P^T a|^2 + c^2 (sum a -
    1)^2 are, but for a factor, those of the nearest point, whatever c is (Wolfe 1976).
    """
    from scipy.optimize import nnls

    exact = as_float64(points).cpu()
    if not exact.isfinite().all():
        return float("nan")
    size = float(torch.linalg.vector_norm(exact, dim=1).max())
    if size == 0:
        return 0.0
    system = torch.cat([exact.mT / size, exact.new_ones(1, len(exact))])
    rows = torch.linalg.qr(torch.cat([system, _target(system)[:, None]], 1), mode="r").R.numpy()  # as tall as wide
    weights, _ = nnls(rows[:, :-1], rows[:, -1], maxiter=50 * len(exact))
    nearest = exact.numpy().T @ (weights / weights.sum())
    distance = float(np.linalg.norm(nearest))
    return distance if distance > INSIDE * size else 0.0


def _target(system: Tensor) -> Tensor:
    target = system.new_zeros(len(system))
    target[-1] = 1
    return target
