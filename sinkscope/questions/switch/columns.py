"""Is a sink a switch? What a head writes in the rows that give their attention to the first token.

After Lampert et al. 2605.08453: a sink is a switch that turns the head off (its output is 0 in a sink row), and a head
whose rows attend to themselves is an MLP. Queries i >= 1 count. o_i is what the attention call returns, before a gate
or norm that some models put after it. W_O^h is the head's slice of the output projection; a later norm is left out.
m = mean over j >= 1 of norm(W_O^h v_j), in the same sequence: the size of what the head writes where it copies one
value. A row is off where norm(W_O^h o_i) < 0.1 m, and on the sink where A[i,0] >= 0.9.

A sink at the first token needs a W with z_j^T W (z_0 - z_i) > 0 for every query j and every i != 0 (proposition 4.1):
`alignment_margin` says whether one exists. That cosines of embeddings are above 0 is a reading of ours, and neither
needed nor enough: the paper's own construction has BOS orthogonal to all other tokens. The cosines of layers.csv below
are read position by position, as its figure 1 shows them. x is the residual stream entering the block, z what the q/k/v
projections read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.capture.precision import as_float64, as_widest
from sinkscope.capture.token_sums import inverse
from sinkscope.capture.view import LayerView, Missing, need, once_per_view
from sinkscope.metrics import mass
from sinkscope.metrics.geometry import largest_margin
from sinkscope.metrics.registry import layer_metric, measured_metric

NAME = "switch"
OFF, SUNK = 0.1, 0.9
LAMPERT = "Lampert et al. 2605.08453"
FIG1 = f"{LAMPERT} fig. 1; statistic ours"
ESTIMATOR = f"{LAMPERT} (hard switch); estimator ours"
COMPENSATION = "ours; a machine-written review of Ran-Milo's paper asks for it"
PROPOSITION = f"{LAMPERT} proposition 4.1; its margin is ours"
ROWS = f"{LAMPERT} section 7 (dormant and copy tokens); thresholds ours"
FEW, MOST = 0.1, 0.5
"""A row copies that gives the first token less than FEW, and the keys that are neither the first nor its own MOST."""

LEAST = 1e-6
"""A standard deviation below this may be rounding."""

HeadValues = Float[Tensor, "batch head"]
LayerValues = Float[Tensor, " batch"]
Cosines = Float[Tensor, "batch token"]
Rows = Float[Tensor, "batch head row"]
"""One value for each query i >= 1."""


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR, map_place=2)
def off_rate(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are off: norm(W_O^h o_i) < 0.1 m. Empty where m is 0."""
    return _share(off(view), openness(view))


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q10(view: LayerView) -> HeadValues:
    """10 % quantile over i >= 1 of norm(W_O^h o_i) / m, with linear interpolation."""
    return quantile(by_size(view), 0.1)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q50(view: LayerView) -> HeadValues:
    """Median over i >= 1 of norm(W_O^h o_i) / m."""
    return quantile(by_size(view), 0.5)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q90(view: LayerView) -> HeadValues:
    """90 % quantile over i >= 1 of norm(W_O^h o_i) / m, with linear interpolation."""
    return quantile(by_size(view), 0.9)


@measured_metric(NAME, unit="share", range="[0, 1]", map_place=1)
def sink_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 on the sink: A[i,0] >= 0.9. Where attention is no softmax, A is the unnormalised
    weight."""
    return as_widest(sunk(view)).mean(-1)


@measured_metric(NAME, unit="share", range="[0, 1]", source=ROWS)
def self_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 with A[i,i] >= 0.9: the query attends almost only to itself. Where attention is no
    softmax, A is the unnormalised weight. Empty in cross-attention."""
    return as_widest(_diagonal(view)[..., 1:] >= SUNK).mean(-1)


@measured_metric(NAME, unit="share", range="[0, 1]", source=ROWS)
def copy_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 with |A[i,0]| < 0.1 whose sum of |A[i,j]| over the other keys, j neither 0 nor i, is at
    least 0.5: the query attends to other tokens. Empty in cross-attention."""
    sums = view.attention
    first, diagonal = sums.first.abs(), _diagonal(view).abs()
    return as_widest(((first < FEW) & (sums.total - first - diagonal >= MOST))[..., 1:]).mean(-1)


@measured_metric(NAME, unit="correlation", range="[-1, 1]", source=ESTIMATOR, map_place=2)
def switch_phi(view: LayerView) -> HeadValues:
    """Phi coefficient over the queries i >= 1 between being on the sink and being off: 1 where exactly the queries on
    the sink are off, 0 where the two are uncorrelated. Empty in sequences in which all queries agree in one of the
    two."""
    x, y = as_widest(sunk(view)), as_widest(off(view))
    covariance = (x * y).mean(-1) - x.mean(-1) * y.mean(-1)
    spread = _variance(x.mean(-1)) * _variance(y.mean(-1))
    phi = covariance / torch.where(spread > 0, spread, torch.nan).sqrt()
    return _known(phi, openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def off_not_sunk(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are off, but not on the sink."""
    return _share(off(view) & ~sunk(view), openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def sunk_not_off(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are on the sink, but not off: the head writes although it attends to the sink."""
    return _share(sunk(view) & ~off(view), openness(view))


@measured_metric(NAME, unit="ratio", range="[0, inf)", map_place=4)
def from_sink(view: LayerView) -> HeadValues:
    """(sum over i >= 1 of norm(W_O^h A[i,0] v_0)^2) / (sum over i >= 1 of norm(W_O^h o_i)^2): the energy that comes
    from the first token. It may exceed 1. from_sink, from_self and communication need not sum to 1, because what they
    measure need not be orthogonal. Empty where the head writes nothing."""
    energy = as_widest(view.attention.first[..., 1:]).square().sum(-1)
    return energy * as_widest(view.written_value_norms[..., 0]).square() / written_energy(view)


@measured_metric(NAME, unit="ratio", range="[0, inf)")
def from_self(view: LayerView) -> HeadValues:
    """(sum over i >= 1 of norm(W_O^h A[i,i] v_i)^2) / (sum over i >= 1 of norm(W_O^h o_i)^2): the energy that comes
    from the query's own token. It may exceed 1. Empty in cross-attention, and where the head writes nothing."""
    norms = as_widest(_diagonal(view)[..., 1:]) * as_widest(view.written_value_norms[..., 1:])
    return norms.square().sum(-1) / written_energy(view)


@measured_metric(
    NAME, unit="ratio", range="[0, inf)", source=f"{LAMPERT} (a head without it is an MLP); estimator ours", map_place=3
)
def communication(view: LayerView) -> HeadValues:
    """(sum over i >= 1 of norm(W_O^h (o_i - A[i,0] v_0 - A[i,i] v_i))^2) / (sum over i >= 1 of norm(W_O^h o_i)^2): the
    energy that the head moves between tokens. It is 0 in a head that acts as an MLP. It may exceed 1. Empty in
    cross-attention, and where the head writes nothing."""
    diagonal, first = (weights[..., 1:].unsqueeze(-1) for weights in (_diagonal(view), view.attention.first))
    parts, norms = (attended(view), view.written_values, diagonal, first), []
    for rows, values, to_self, to_first in zip(*(part.split(_together(view)) for part in parts), strict=True):
        moved = torch.addcmul(rows, to_self, values[..., 1:, :], value=-1)
        moved.addcmul_(to_first, values[..., :1, :], value=-1)
        norms.append(torch.linalg.vector_norm(moved, dim=-1))
    return as_widest(torch.cat(norms)).square().sum(-1) / written_energy(view)


@measured_metric(NAME, unit="share", range="[0, 1]", source="Sun et al. 2402.17762 (sinks as biases); estimator ours")
def constant_share(view: LayerView) -> HeadValues:
    """norm(mean over i >= 1 of W_O^h o_i)^2 / (mean over i >= 1 of norm(W_O^h o_i)^2): 1 where the head writes the same
    vector for every query, as a bias would. Empty where the head writes nothing."""
    rows = attended(view)
    return as_widest(rows.mean(2)).square().sum(-1) * rows.shape[2] / written_energy(view)


@measured_metric(NAME, unit="correlation", range="[-1, 1]", source="ours")
def alignment_openness(view: LayerView) -> HeadValues:
    """Pearson correlation over i >= 1 between cos(z_0, z_i) and norm(W_O^h o_i) / m. Below 0, the head writes less for
    tokens that are better aligned with the first token. Empty in cross-attention, and where either hardly varies (a
    standard deviation below 1e-6)."""
    cosines = input_cosines(view)
    if view.site.cross or cosines.shape[-1] != view.keys:
        raise Missing
    rows = openness(view)
    aligned = (cosines[:, 1:] - cosines[:, 1:].mean(-1, keepdim=True)).unsqueeze(1)
    opened = rows - rows.mean(-1, keepdim=True)
    spreads = [deviation.square().mean(-1).sqrt() for deviation in (aligned, opened)]
    varied = (spreads[0] > LEAST) & (spreads[1] > LEAST)
    return torch.where(varied, (aligned * opened).mean(-1) / (spreads[0] * spreads[1]), torch.nan)


@measured_metric(NAME, unit="nats", range="[0, inf)", source="Gu et al. 2410.10781 (key biases); estimator ours")
def key_bias(view: LayerView) -> HeadValues:
    """Standard deviation over i >= 1, with 1/n, of s_i0 - log(mean_j exp s_ij). The mean is over the other keys j that
    i sees; exp of a learned sink logit is added to its sum. It is 0 where every query prefers the first token equally,
    as with a bias on its key. Queries that cannot see key 0, or see nothing else, are left out. Empty where fewer than
    two are left, and where attention is no softmax.

    It is the sink margin plus the log of the number of other keys. The margin alone would fall with log i under causal
    attention, whatever the keys.
    """
    visible = view.attention.visible[..., 1:]
    margin = as_widest(view.attention.margin[..., 1:]) + as_widest(visible - 1).log()
    there = margin.isfinite()
    count = there.sum(-1)
    kept = torch.where(there, margin, 0.0)
    mean = kept.sum(-1) / count
    square = torch.where(there, margin - mean.unsqueeze(-1), 0.0).square().sum(-1)
    return torch.where(count > 1, square / count, torch.nan).sqrt()


@layer_metric(unit="ratio", range="[0, 1]", source=COMPENSATION, measure=NAME)
def compensation(view: LayerView) -> Float[Tensor, " batch"]:
    """(mean over i >= 1 of norm(sum_h W_O^h w_i^h)) / (mean over i >= 1 of sum_h norm(W_O^h w_i^h)). The sums are over
    the layer's heads h, and w_i^h is w_i of head h. It is 1 where all heads write in the same direction, and 0 where
    they cancel. Compare it with compensation_unrelated. Empty where what projects the output is not known."""
    total = torch.linalg.vector_norm(need(view.raw_written)[:, 1:], dim=-1)
    return as_widest(total).mean(-1) / _sum_of_norms(view)


@layer_metric(unit="ratio", range="[0, 1]", measure=NAME)
def compensation_unrelated(view: LayerView) -> Float[Tensor, " batch"]:
    """What compensation would be if the heads wrote in orthogonal directions: (mean over i >= 1 of sqrt(sum_h
    norm(W_O^h w_i^h)^2)) / (mean over i >= 1 of sum_h norm(W_O^h w_i^h)). For H heads of equal norms it is 1/sqrt(H).
    If compensation is smaller, heads cancel in part."""
    squares = view.over_heads(as_widest(view.written_norms[..., 1:]).square().mean(1)) * view.layer_heads
    return squares.sqrt().mean(-1) / _sum_of_norms(view)


@once_per_view
def openness(view: LayerView) -> Rows:
    """norm(W_O^h o_i) / m of every query i >= 1; NaN where m is 0."""
    size = as_widest(view.written_value_norms[..., 1:]).mean(-1, keepdim=True)
    return as_widest(attended_norms(view)) / torch.where(size > 0, size, torch.nan)


@once_per_view
def off(view: LayerView) -> Bool[Tensor, "batch head row"]:
    """Whether a query i >= 1 is off."""
    return openness(view) < OFF


def sunk(view: LayerView) -> Bool[Tensor, "batch head row"]:
    """Whether a query i >= 1 is on the sink."""
    return view.attention.first[..., 1:] >= SUNK


@once_per_view
def attended_norms(view: LayerView) -> Rows:
    """norm(W_O^h o_i) of every query i >= 1."""
    return view.written_norms[..., 1:] if view.plain else torch.linalg.vector_norm(attended(view), dim=-1)


@once_per_view
def attended(view: LayerView) -> Float[Tensor, "batch head row rank"]:
    """W_O^h o_i of every query i >= 1, in the coordinates of `LayerView.written`."""
    if view.plain:
        return view.written[..., 1:, :]
    return torch.einsum("bthd,hrd->bhtr", need(view.output)[:, 1:], need(view.factors))


@once_per_view
def written_energy(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h o_i)^2; NaN where it is 0, since shares of it are taken."""
    energy = as_widest(attended_norms(view)).square().sum(-1)
    return torch.where(energy > 0, energy, torch.nan)


@once_per_view
def by_size(view: LayerView) -> Rows:
    """norm(W_O^h o_i) / m of all queries i >= 1, the smallest first."""
    return openness(view).sort(-1).values


def quantile(ordered: Float[Tensor, "*batch row"], share: float) -> Float[Tensor, "*batch"]:
    """The quantile of rising values, on the straight line between two of them; NaN where a value is missing."""
    place = share * (ordered.shape[-1] - 1)
    low = int(place)
    high = min(low + 1, ordered.shape[-1] - 1)
    return _known(torch.lerp(ordered[..., low], ordered[..., high], place - low), ordered[..., -1:])


def _together(view: LayerView) -> int:
    """How many sequences to take together: a CPU takes one at a time, which its caches hold."""
    return 1 if view.attention.first.device.type == "cpu" else view.batch


def _diagonal(view: LayerView) -> Float[Tensor, "batch head query"]:
    if view.attention.diagonal is None or view.site.cross:
        raise Missing
    return view.attention.diagonal


def _sum_of_norms(view: LayerView) -> Float[Tensor, " batch"]:
    """Mean over i >= 1 of the sum over all heads of norm(W_O^h w_i^h); NaN where it is 0."""
    total = view.layer_mean(as_widest(view.written_norms[..., 1:]).mean(-1))[:, 0] * view.layer_heads
    return torch.where(total > 0, total, torch.nan)


def _share(rows: Bool[Tensor, "batch head row"], known: Rows) -> HeadValues:
    return _known(as_widest(rows).mean(-1), known)


def _known(values: Tensor, rows: Tensor) -> Tensor:
    """The values; NaN where one of the rows they come from is missing."""
    return torch.where(rows.isnan().any(-1), torch.nan, values)


def _variance(share: Tensor) -> Tensor:
    return share * (1 - share)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_residual_min(view: LayerView) -> LayerValues:
    """Smallest cos(x_0, x_j) over j >= 1."""
    return residual_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_residual_q05(view: LayerView) -> LayerValues:
    """5 % quantile over j >= 1 of cos(x_0, x_j), with linear interpolation."""
    return quantile(residual_cosines(view)[:, 1:].sort(-1).values, 0.05)


@layer_metric(unit="cosine", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_residual_std(view: LayerView) -> LayerValues:
    """Standard deviation over j >= 1, with 1/n, of cos(x_0, x_j)."""
    return residual_cosines(view)[:, 1:].std(-1, correction=0)


@layer_metric(unit="share", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_residual_positive(view: LayerView) -> LayerValues:
    """Share of tokens j >= 1 with cos(x_0, x_j) > 0."""
    return (residual_cosines(view)[:, 1:] > 0).double().mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_peak_residual(view: LayerView) -> LayerValues:
    """Mean over j != p of cos(x_p, x_j). The position p is the layer's strongest key in the sequence: the k with the
    largest mean over heads of alpha_k, in a tie the lowest k. Only keys with n_k >= n_max/4 in every head are
    considered. Where p = 0, it equals cos_first_residual."""
    return _around_peak(view, view.x, view.x_norms, residual_cosines)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_min(view: LayerView) -> LayerValues:
    """Smallest cos(z_0, z_j) over j >= 1."""
    return input_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_q05(view: LayerView) -> LayerValues:
    """5 % quantile over j >= 1 of cos(z_0, z_j), with linear interpolation."""
    return quantile(input_cosines(view)[:, 1:].sort(-1).values, 0.05)


@layer_metric(unit="cosine", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_input_std(view: LayerView) -> LayerValues:
    """Standard deviation over j >= 1, with 1/n, of cos(z_0, z_j)."""
    return input_cosines(view)[:, 1:].std(-1, correction=0)


@layer_metric(unit="share", range="[0, 1]", source=FIG1, measure=NAME)
def cos_first_input_positive(view: LayerView) -> LayerValues:
    """Share of tokens j >= 1 with cos(z_0, z_j) > 0."""
    return (input_cosines(view)[:, 1:] > 0).double().mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_peak_input(view: LayerView) -> LayerValues:
    """Mean over j != p of cos(z_p, z_j), with p as in cos_peak_residual."""
    return _around_peak(view, view.z, view.z_norms, input_cosines)


@layer_metric(unit="ratio", range="[0, inf)", source=PROPOSITION, measure=NAME, sampled=True)
def alignment_margin(view: LayerView) -> LayerValues:
    """The largest m for which some matrix M with |M|_F <= 1 has z_i^T M (z_0 - z_j) >= m for all i, j >= 1, divided by
    the mean over i >= 1 of |z_i|^2. Above 0, some M makes the logits z_i^T M z_j largest at key 0 for all queries i; at
    0, no M does. It is the distance of 0 from the convex hull of the z_j, times that of z_0 from the hull of the z_i,
    divided by that mean. A distance of at most 2^-18 of the mean's root counts as 0, since rounding leaves as much
    between equal tokens. Measured on the first n sequences only, as matrix_entropy is. Empty in cross-attention, whose
    keys are of another text.

    The shortest vectors v and u of the two distances give W = v u^T with this margin, and the weights a, b of the
    nearest points give every other W a mean sum_ji a_j b_i z_j^T W (z_0 - z_i) = v^T W u, which is no larger. Both are
    above 0 wherever the tokens are linearly independent, as T <= D tokens mostly are: then only the size says
    anything."""
    return _margins_of(view, 0)


@layer_metric(unit="ratio", range="[0, inf)", source=f"{PROPOSITION}; the control is ours", measure=NAME, sampled=True)
def alignment_margin_other(view: LayerView) -> LayerValues:
    """alignment_margin for the token in the middle, at position T // 2, instead of token 0: i and j are then all other
    tokens."""
    return _margins_of(view, view.z.shape[1] // 2)


def _margins_of(view: LayerView, token: int) -> LayerValues:
    """The largest margin of a sink at this token, for each sequence."""
    if view.site.cross:
        raise Missing
    margins = [largest_margin(z, token) for z in as_float64(view.z)]
    return torch.tensor(margins, dtype=torch.float64, device=view.z.device)


@once_per_view
def residual_cosines(view: LayerView) -> Cosines:
    """cos(x_0, x_j) of every token j; 0 for a zero vector."""
    return as_widest(view.x_sums.first_cosines)


@once_per_view
def input_cosines(view: LayerView) -> Cosines:
    """cos(z_0, z_j) of every token j; 0 for a zero vector."""
    return as_widest(view.z_sums.first_cosines)


def by_position(view: LayerView) -> Float[Tensor, "batch coordinate token"]:
    """cos(x_0, x_j) and its square, cos(z_0, z_j) and its square; NaN for what the layer lacks.

    Raises Missing where the block's tokens are not the keys.
    """
    rows = []
    for cosines in (residual_cosines, input_cosines):
        try:
            values = cosines(view)
        except Missing:
            values = as_widest(view.attention.columns[:, 0] * torch.nan)
        rows += [values, values.square()]
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
        cosines = as_widest(dots * inverse(norms) * inverse(norms[rows, peak])[:, None])
    average = (cosines.sum(-1) - cosines[rows, peak]) / (x.shape[1] - 1)
    return average.where(peak >= 0, torch.nan)


@once_per_view
def strongest_key(view: LayerView) -> Int[Tensor, " batch"]:
    """The key with the largest mean over heads of alpha_k, among those with n_k >= n_max/4 in every head; -1
    where there is no such key."""
    alpha = mass.alpha(view).masked_fill(~mass.keys_ranked(view), -torch.inf)
    largest, place = view.over_heads(alpha.mean(1)).max(-1)
    return place.where(largest > -torch.inf, -1)
