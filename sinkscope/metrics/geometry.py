"""Geometry: why the sink wins the softmax, and how far a point lies from the convex hull of others.

q and k are taken as the softmax sees them, after rotary embedding and q/k norm. Columns about queries are per query
head; columns about keys alone are constant within a key/value group. Means over pairs need no T x T matrix: the mean of
cosines is a dot product with the sum of unit keys. Unless a column says otherwise, masks and windows are ignored."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.capture.precision import EQUAL, as_float64
from sinkscope.capture.view import LayerView
from sinkscope.metrics.registry import head_metric

HeadValues = Float[Tensor, "batch head"]


@head_metric(unit="cosine", range="[-1, 1]")
def qk_cos_first(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of cos(q_i, k_0). Windows are ignored."""
    first = view.per_query_head(normalize(view.key[:, :, 0], dim=-1))
    return torch.linalg.vecdot(view.query_sums.unit_sum, first) / (view.queries - 1 or torch.nan)


@head_metric(unit="cosine", range="[-1, 1]")
def qk_cos_other(view: LayerView) -> HeadValues:
    """Mean over pairs 1 <= j <= i of cos(q_i, k_j). In bidirectional and cross heads, mean over all pairs i >= 1, j >=
    1. Windows are ignored."""
    queries, keys, summed = view.queries - 1, view.keys - 1, view.query_sums.paired
    pairs = queries * (queries + 1) / 2  # query 0 sees none of the keys that count
    if summed is None:
        pairs = queries * keys
        unit_keys = view.per_query_head(normalize(view.key[:, :, 1:], dim=-1).sum(2))
        summed = torch.linalg.vecdot(view.query_sums.unit_sum, unit_keys)
    return summed / (pairs or torch.nan)


@head_metric(unit="norm", range="[0, inf)")
def q_norm(view: LayerView) -> HeadValues:
    """Mean over all queries i of norm q_i."""
    return view.query_sums.norms.mean(-1)


@head_metric(unit="norm", range="[0, inf)")
def k_norm_first(view: LayerView) -> HeadValues:
    """norm k_0. Heads of one key/value group have the same value."""
    return view.per_query_head(view.key_norms[..., 0])


@head_metric(unit="norm", range="[0, inf)")
def k_norm_other(view: LayerView) -> HeadValues:
    """Mean over j >= 1 of norm k_j. Heads of one key/value group have the same value."""
    return view.per_query_head(view.key_norms[..., 1:].mean(-1))


@head_metric(unit="logit", range="(-inf, inf)", source="Guo et al. 2410.13835", dormant="high")
def logit_gap(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of (s_i0 - mean_{j<=i} s_ij). In bidirectional and cross heads, the inner mean is over all keys
    j. Where the mask adds a finite bias (ALiBi), it is over the keys that i may see. Otherwise masks and windows are
    ignored. Empty where the logit of a hidden key is not known: where a model masks logits in code of its own, or adds
    a position bias to them over a cache that drops keys."""
    return view.attention.logit_gap[..., 1:].mean(-1)


# How far a point lies from the convex hull of others, in float64.


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


def largest_margin(z: Float[Tensor, "token channel"], token: int) -> float:
    """The largest margin of a sink at `token` over all other tokens, as `alignment_margin` defines it; NaN where all
    others are 0."""
    rest = z[torch.arange(len(z), device=z.device) != token]
    size = float(rest.square().sum(-1).mean())
    least = math.sqrt(EQUAL * size)  # what a float32 model leaves between equal tokens, more than INSIDE
    distances = hull_distance(rest), hull_distance(z[token] - rest)
    margin = math.prod(0.0 if distance <= least else distance for distance in distances)
    return margin / size if size > 0 else math.nan
