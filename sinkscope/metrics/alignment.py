"""How the first token's embedding lies to all others, position by position. After Lampert et al. 2605.08453 fig. 1.

A sink at the first token needs an embedding that is aligned with that of every query: their claim is about every
position, so that the mean cosine (`cos_first_residual`) alone cannot show it. x is the residual stream entering the
block, z what the q/k/v projections read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture.precision import wide
from sinkscope.capture.token_sums import inverse
from sinkscope.capture.view import LayerView, Missing, once_per_view
from sinkscope.metrics import mass
from sinkscope.metrics.registry import layer_metric
from sinkscope.metrics.switch import NAME, quantile

FIG1 = "Lampert et al. 2605.08453 fig. 1; statistic ours"

LayerValues = Float[Tensor, " batch"]
Cosines = Float[Tensor, "batch token"]


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_residual_min(view: LayerView) -> LayerValues:
    """Smallest over j >= 1 of cos(x_0, x_j)."""
    return residual_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_residual_q05(view: LayerView) -> LayerValues:
    """The 5 % quantile over j >= 1 of cos(x_0, x_j); between two values, the straight line."""
    return quantile(residual_cosines(view)[:, 1:].sort(-1).values, 0.05)


@layer_metric(unit="cosine", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_residual_std(view: LayerView) -> LayerValues:
    """Standard deviation over j >= 1 (1/n) of cos(x_0, x_j)."""
    return residual_cosines(view)[:, 1:].std(-1, correction=0)


@layer_metric(unit="share", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_residual_positive(view: LayerView) -> LayerValues:
    """Share of j >= 1 with cos(x_0, x_j) > 0."""
    return (residual_cosines(view)[:, 1:] > 0).double().mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_peak_residual(view: LayerView) -> LayerValues:
    """Mean over j != p of cos(x_p, x_j), p = the layer's strongest key: the largest mean over heads of alpha_k, among
    keys k with at least T/4 query rows, in each sequence by itself. It equals cos_first_residual where p = 0."""
    return _around_peak(view, view.x, view.x_norms, residual_cosines)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_min(view: LayerView) -> LayerValues:
    """Smallest over j >= 1 of cos(z_0, z_j)."""
    return input_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_q05(view: LayerView) -> LayerValues:
    """The 5 % quantile over j >= 1 of cos(z_0, z_j); between two values, the straight line."""
    return quantile(input_cosines(view)[:, 1:].sort(-1).values, 0.05)


@layer_metric(unit="cosine", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_input_std(view: LayerView) -> LayerValues:
    """Standard deviation over j >= 1 (1/n) of cos(z_0, z_j)."""
    return input_cosines(view)[:, 1:].std(-1, correction=0)


@layer_metric(unit="share", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_input_positive(view: LayerView) -> LayerValues:
    """Share of j >= 1 with cos(z_0, z_j) > 0."""
    return (input_cosines(view)[:, 1:] > 0).double().mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_peak_input(view: LayerView) -> LayerValues:
    """Mean over j != p of cos(z_p, z_j), p = the layer's strongest key, as in cos_peak_residual."""
    return _around_peak(view, view.z, view.z_norms, input_cosines)


@once_per_view
def residual_cosines(view: LayerView) -> Cosines:
    """cos(x_0, x_j) of every token j; 0 for a zero vector."""
    return wide(view.x_sums.first_cosines)


@once_per_view
def input_cosines(view: LayerView) -> Cosines:
    """cos(z_0, z_j) of every token j; 0 for a zero vector."""
    return wide(view.z_sums.first_cosines)


def by_position(view: LayerView) -> Float[Tensor, "batch coordinate token"]:
    """cos(x_0, x_j) and its square, cos(z_0, z_j) and its square; NaN for what the layer lacks.

    Raises Missing where the block's tokens are not the keys.
    """
    rows = []
    for cosines in (residual_cosines, input_cosines):
        try:
            found = cosines(view)
        except Missing:
            found = wide(view.attention.columns[:, 0] * torch.nan)
        rows += [found, found.square()]
    if view.site.cross or any(row.shape[-1] != view.keys for row in rows):
        raise Missing
    return torch.stack(rows, 1)


def _around_peak(
    view: LayerView, x: Float[Tensor, "batch token channel"], norms: Cosines, with_first: Callable[[LayerView], Cosines]
) -> LayerValues:
    if view.site.cross or x.shape[1] != view.keys:
        raise Missing
    rows, peak = torch.arange(view.batch, device=x.device), strongest_key(view)
    if peak.device.type == "cpu" and not peak.any():  # a GPU would have to be waited for
        cosines = with_first(view)
    else:
        dots = torch.einsum("btd,bd->bt", x, x[rows, peak])
        cosines = wide(dots * inverse(norms) * inverse(norms[rows, peak])[:, None])
    return (cosines.sum(-1) - cosines[rows, peak]) / (x.shape[1] - 1)


@once_per_view
def strongest_key(view: LayerView) -> Int[Tensor, " batch"]:
    """The key with the largest mean over heads of alpha_k, among those with at least T/4 query rows."""
    eligible = mass.eligible_keys(view.queries, view.keys, view.attention.causal)
    return view.over_heads(mass.alpha(view)[..., :eligible].mean(1)).argmax(-1)
