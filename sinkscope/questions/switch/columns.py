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
from sinkscope.metrics.geometry import hull_distance
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
    """The 10 % quantile over i >= 1 of norm(W_O^h o_i) / m; with linear interpolation."""
    return quantile(by_size(view), 0.1)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q50(view: LayerView) -> HeadValues:
    """The median over i >= 1 of norm(W_O^h o_i) / m."""
    return quantile(by_size(view), 0.5)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q90(view: LayerView) -> HeadValues:
    """The 90 % quantile over i >= 1 of norm(W_O^h o_i) / m."""
    return quantile(by_size(view), 0.9)


@measured_metric(NAME, unit="share", range="[0, 1]", map_place=1)
def sink_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 on the sink: A[i,0] >= 0.9. Of a score that is no softmax, A is the raw score."""
    return as_widest(sunk(view)).mean(-1)


@measured_metric(NAME, unit="share", range="[0, 1]", source=ROWS)
def self_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 with A[i,i] >= 0.9: the query reads itself alone. Empty in cross-attention. Of a score
    that is no softmax, A is the raw score."""
    return as_widest(_diagonal(view)[..., 1:] >= SUNK).mean(-1)


@measured_metric(NAME, unit="share", range="[0, 1]", source=ROWS)
def copy_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 with |A[i,0]| < 0.1 and sum_j |A[i,j]| >= 0.5 over the keys j that are neither 0 nor i:
    the query reads other tokens. Empty in cross-attention."""
    sums = view.attention
    first, own = sums.first.abs(), _diagonal(view).abs()
    total = 1 - sums.learned_sink if sums.row_total is None else sums.row_total
    return as_widest(((first < FEW) & (total - first - own >= MOST))[..., 1:]).mean(-1)


@measured_metric(NAME, unit="correlation", range="[-1, 1]", source=ESTIMATOR, map_place=2)
def switch_phi(view: LayerView) -> HeadValues:
    """Phi coefficient over i >= 1 of [on the sink] and [off]: 1 where the rows on the sink are the rows that are off,
    0 where the two are unrelated. Empty in sequences in which either never varies."""
    x, y = as_widest(sunk(view)), as_widest(off(view))
    covariance = (x * y).mean(-1) - x.mean(-1) * y.mean(-1)
    spread = _variance(x.mean(-1)) * _variance(y.mean(-1))
    found = covariance / torch.where(spread > 0, spread, torch.nan).sqrt()
    return _known(found, openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def off_not_sunk(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are off, but not on the sink: the head is off without a sink."""
    return _share(off(view) & ~sunk(view), openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def sunk_not_off(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are on the sink, but not off: the head writes although it attends to the sink."""
    return _share(sunk(view) & ~off(view), openness(view))


@measured_metric(NAME, unit="ratio", range="[0, inf)", map_place=4)
def from_sink(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h A[i,0] v_0)^2, over sum norm(W_O^h o_i)^2. It may exceed 1, and from_sink,
    from_self and communication need not sum to 1: the parts need not be orthogonal."""
    energy = as_widest(view.attention.first[..., 1:]).square().sum(-1)
    return energy * as_widest(view.written_value_norms[..., 0]).square() / written_energy(view)


@measured_metric(NAME, unit="ratio", range="[0, inf)")
def from_self(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h A[i,i] v_i)^2, over sum norm(W_O^h o_i)^2; may exceed 1. Empty in
    cross-attention."""
    own = as_widest(_diagonal(view)[..., 1:]) * as_widest(view.written_value_norms[..., 1:])
    return own.square().sum(-1) / written_energy(view)


@measured_metric(
    NAME, unit="ratio", range="[0, inf)", source=f"{LAMPERT} (a head without it is an MLP); estimator ours", map_place=3
)
def communication(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h (o_i - A[i,0] v_0 - A[i,i] v_i))^2, over sum norm(W_O^h o_i)^2: what the head
    moves between tokens. 0 is an MLP; it may exceed 1. Empty in cross-attention."""
    own, first = (weights[..., 1:].unsqueeze(-1) for weights in (_diagonal(view), view.attention.first))
    parts, norms = (attended(view), view.written_values, own, first), []
    for rows, values, to_self, to_first in zip(*(each.split(_together(view)) for each in parts), strict=True):
        moved = torch.addcmul(rows, to_self, values[..., 1:, :], value=-1)
        moved.addcmul_(to_first, values[..., :1, :], value=-1)
        norms.append(torch.linalg.vector_norm(moved, dim=-1))
    return as_widest(torch.cat(norms)).square().sum(-1) / written_energy(view)


@measured_metric(NAME, unit="share", range="[0, 1]", source="Sun et al. 2402.17762 (sinks as biases); estimator ours")
def constant_share(view: LayerView) -> HeadValues:
    """norm(mean over i >= 1 of W_O^h o_i)^2, over mean norm(W_O^h o_i)^2: 1 where the head writes the same vector in
    every row, as a bias would."""
    rows = attended(view)
    return as_widest(rows.mean(2)).square().sum(-1) * rows.shape[2] / written_energy(view)


@measured_metric(NAME, unit="correlation", range="[-1, 1]", source="ours")
def alignment_openness(view: LayerView) -> HeadValues:
    """Pearson correlation over i >= 1 of cos(z_0, z_i) and norm(W_O^h o_i) / m: below 0 where the head writes less in
    the rows of tokens that are better aligned with the first. Empty where either hardly varies (a standard deviation
    below 1e-6), and in cross-attention."""
    cosines = input_cosines(view)
    if view.site.cross or cosines.shape[-1] != view.keys:
        raise Missing
    rows = openness(view)
    aligned = (cosines[:, 1:] - cosines[:, 1:].mean(-1, keepdim=True)).unsqueeze(1)
    opened = rows - rows.mean(-1, keepdim=True)
    spreads = [each.square().mean(-1).sqrt() for each in (aligned, opened)]
    varied = (spreads[0] > LEAST) & (spreads[1] > LEAST)
    return torch.where(varied, (aligned * opened).mean(-1) / (spreads[0] * spreads[1]), torch.nan)


@measured_metric(NAME, unit="nats", range="[0, inf)", source="Gu et al. 2410.10781 (key biases); estimator ours")
def key_bias(view: LayerView) -> HeadValues:
    """Standard deviation over i >= 1 (1/n) of s_i0 - log mean_j exp s_ij, the mean over the other keys j that i sees,
    with a learned sink added to their sum. 0 where the first token's advantage is the same for every query, as a
    bias of its key would make it. Queries that cannot see key 0, or see nothing else, are left out; empty where fewer
    than two are left.

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
    """Mean over i >= 1 of norm(sum_h W_O^h w_i^h), over the mean over i >= 1 of sum_h norm(W_O^h w_i^h): 1 = the heads
    of a layer write in the same direction, 0 = they cancel; see compensation_unrelated. w_i is what the output
    projection reads."""
    total = torch.linalg.vector_norm(need(view.raw_written)[:, 1:], dim=-1)
    return as_widest(total).mean(-1) / _sum_of_norms(view)


@layer_metric(unit="ratio", range="[0, 1]", measure=NAME)
def compensation_unrelated(view: LayerView) -> Float[Tensor, " batch"]:
    """What compensation would be if the heads wrote in orthogonal directions: mean over i >= 1 of sqrt(sum_h
    norm(W_O^h w_i^h)^2), over the same mean of sum_h norm(W_O^h w_i^h). 1/sqrt(H) for H heads of equal norms. A
    compensation below it means that heads cancel."""
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
    """Smallest over j >= 1 of cos(x_0, x_j)."""
    return residual_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_residual_q05(view: LayerView) -> LayerValues:
    """The 5 % quantile over j >= 1 of cos(x_0, x_j); with linear interpolation."""
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
    keys k with n_k >= n_max/4 in every head, in each sequence by itself; the lowest k in a tie. It equals
    cos_first_residual where p = 0."""
    return _around_peak(view, view.x, view.x_norms, residual_cosines)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_min(view: LayerView) -> LayerValues:
    """Smallest over j >= 1 of cos(z_0, z_j)."""
    return input_cosines(view)[:, 1:].amin(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1, measure=NAME)
def cos_first_input_q05(view: LayerView) -> LayerValues:
    """The 5 % quantile over j >= 1 of cos(z_0, z_j); with linear interpolation."""
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


@layer_metric(unit="ratio", range="[0, inf)", source=PROPOSITION, measure=NAME, sampled=True)
def alignment_margin(view: LayerView) -> LayerValues:
    """The largest margin m for which a W with norm(W)_F = 1 and z_j^T W (z_0 - z_i) >= m for all i, j >= 1 exists, over
    mean norm(z_j)^2, j >= 1: if it is above 0, a sink at key 0 is possible for all queries; if it is 0, it is not.
    Measured on the first n sequences only, as matrix_entropy is.

    It is the product of two distances: of 0 from the convex hull of the z_j, and of z_0 from that of the z_i. Their
    shortest vectors v and u give W = v u^T with this margin, and the weights a, b of the nearest points give every
    other W a mean sum_ji a_j b_i z_j^T W (z_0 - z_i) = v^T W u, which is no larger. Both are above 0 wherever the
    tokens are linearly independent, as T <= D tokens mostly are: then only the size says anything."""
    return _margins_of(view, 0)


@layer_metric(unit="ratio", range="[0, inf)", source=f"{PROPOSITION}; the control is ours", measure=NAME, sampled=True)
def alignment_margin_other(view: LayerView) -> LayerValues:
    """alignment_margin of the token in the middle, position T // 2, in place of token 0: all other tokens are then i
    and j."""
    return _margins_of(view, view.z.shape[1] // 2)


def _margins_of(view: LayerView, token: int) -> LayerValues:
    """The largest margin of a sink at this token, for each sequence."""
    if view.site.cross:
        raise Missing
    others = torch.arange(view.z.shape[1], device=view.z.device) != token
    found = []
    for z in as_float64(view.z):
        rest = z[others]
        size = rest.square().sum(-1).mean()
        margin = hull_distance(rest) * hull_distance(z[token] - rest)
        found.append(margin / float(size) if size > 0 else torch.nan)
    return torch.tensor(found, dtype=torch.float64, device=view.z.device)


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
            found = cosines(view)
        except Missing:
            found = as_widest(view.attention.columns[:, 0] * torch.nan)
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
        cosines = as_widest(dots * inverse(norms) * inverse(norms[rows, peak])[:, None])
    found = (cosines.sum(-1) - cosines[rows, peak]) / (x.shape[1] - 1)
    return found.where(peak >= 0, torch.nan)


@once_per_view
def strongest_key(view: LayerView) -> Int[Tensor, " batch"]:
    """The key with the largest mean over heads of alpha_k, among those with n_k >= n_max/4 in every head; -1
    where there is no such key."""
    alpha = mass.alpha(view).masked_fill(~mass.ranked(view.attention.seen_by), -torch.inf)
    largest, place = view.over_heads(alpha.mean(1)).max(-1)
    return place.where(largest > -torch.inf, -1)
