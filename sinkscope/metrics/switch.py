"""Is a sink a switch? What a head writes in the rows that give their attention to the first token.

After Lampert et al. 2605.08453: a sink is a switch that turns the head off (its output is 0 in a sink row), and a head
whose rows attend to themselves is an MLP. Queries i >= 1 count. o_i is what the attention call returns, before a gate
or norm that some models put after it. W_O^h is the head's slice of the output projection; a later norm is left out.
m = mean over j >= 1 of norm(W_O^h v_j), in the same sequence: the size of what the head writes where it copies one
value. A row is off where norm(W_O^h o_i) < 0.1 m, and sunk where A[i,0] >= 0.9.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.capture.precision import wide
from sinkscope.capture.view import LayerView, Missing, need, once_per_view
from sinkscope.metrics.registry import layer_metric, measured_metric

NAME = "switch"
OFF, SUNK = 0.1, 0.9
LAMPERT = "Lampert et al. 2605.08453"
ESTIMATOR = f"{LAMPERT} (hard switch); estimator ours"

HeadValues = Float[Tensor, "batch head"]
Rows = Float[Tensor, "batch head row"]
"""One value for each query i >= 1."""


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def off_rate(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are off: norm(W_O^h o_i) < 0.1 m. Empty where m is 0."""
    return _share(off(view), openness(view))


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q10(view: LayerView) -> HeadValues:
    """The 10 % quantile over i >= 1 of norm(W_O^h o_i) / m; between two values, the straight line."""
    return quantile(by_size(view), 0.1)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q50(view: LayerView) -> HeadValues:
    """The median over i >= 1 of norm(W_O^h o_i) / m."""
    return quantile(by_size(view), 0.5)


@measured_metric(NAME, unit="ratio", range="[0, inf)", source=ESTIMATOR)
def open_q90(view: LayerView) -> HeadValues:
    """The 90 % quantile over i >= 1 of norm(W_O^h o_i) / m."""
    return quantile(by_size(view), 0.9)


@measured_metric(NAME, unit="share", range="[0, 1]")
def sink_rows(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are sunk: A[i,0] >= 0.9. Of a score that is no softmax, A is the raw score."""
    return wide(sunk(view)).mean(-1)


@measured_metric(NAME, unit="correlation", range="[-1, 1]", source=ESTIMATOR)
def switch_phi(view: LayerView) -> HeadValues:
    """Phi coefficient over i >= 1 of [sunk] and [off]: 1 where the sink rows are the off rows, 0 where the two are
    unrelated. Empty in sequences in which either never varies."""
    x, y = wide(sunk(view)), wide(off(view))
    covariance = (x * y).mean(-1) - x.mean(-1) * y.mean(-1)
    spread = _variance(x.mean(-1)) * _variance(y.mean(-1))
    found = covariance / torch.where(spread > 0, spread, torch.nan).sqrt()
    return _known(found, openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def off_not_sunk(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are off, but not sunk: the head is off without a sink."""
    return _share(off(view) & ~sunk(view), openness(view))


@measured_metric(NAME, unit="share", range="[0, 1]", source=ESTIMATOR)
def sunk_not_off(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that are sunk, but not off: the head has a sink and writes all the same."""
    return _share(sunk(view) & ~off(view), openness(view))


@measured_metric(NAME, unit="share", range="[0, inf)")
def from_sink(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h A[i,0] v_0)^2, over sum norm(W_O^h o_i)^2. It may exceed 1, and from_sink,
    from_self and communication need not sum to 1: the parts are no right angles apart."""
    energy = wide(view.attention.first[..., 1:]).square().sum(-1)
    return energy * wide(view.written_value_norms[..., 0]).square() / written_energy(view)


@measured_metric(NAME, unit="share", range="[0, inf)")
def from_self(view: LayerView) -> HeadValues:
    """Sum over i >= 1 of norm(W_O^h A[i,i] v_i)^2, over sum norm(W_O^h o_i)^2; may exceed 1. Empty in
    cross-attention."""
    own = wide(_diagonal(view)[..., 1:]) * wide(view.written_value_norms[..., 1:])
    return own.square().sum(-1) / written_energy(view)


@measured_metric(
    NAME, unit="share", range="[0, inf)", source=f"{LAMPERT} (a head without it is an MLP); estimator ours"
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
    return wide(torch.cat(norms)).square().sum(-1) / written_energy(view)


@measured_metric(NAME, unit="share", range="[0, 1]", source="Sun et al. 2402.17762 (sinks as biases); estimator ours")
def constant_share(view: LayerView) -> HeadValues:
    """norm(mean over i >= 1 of W_O^h o_i)^2, over mean norm(W_O^h o_i)^2: 1 where the head writes the same vector in
    every row, as a bias would."""
    rows = attended(view)
    return wide(rows.mean(2)).square().sum(-1) * rows.shape[2] / written_energy(view)


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
    margin = wide(view.attention.margin[..., 1:]) + wide(visible - 1).log()
    there = margin.isfinite()
    count = there.sum(-1)
    kept = torch.where(there, margin, 0.0)
    mean = kept.sum(-1) / count
    square = torch.where(there, margin - mean.unsqueeze(-1), 0.0).square().sum(-1)
    return torch.where(count > 1, square / count, torch.nan).sqrt()


@layer_metric(unit="ratio", range="[0, 1]", source=f"{LAMPERT} (heads that compensate each other); estimator ours",
              measure=NAME)  # fmt: skip
def compensation(view: LayerView) -> Float[Tensor, " batch"]:
    """Mean over i >= 1 of norm(sum_h W_O^h w_i^h), over mean of sum_h norm(W_O^h w_i^h): 1 = the heads of a layer write
    in the same direction, 0 = they cancel; see compensation_unrelated. w_i is what the output projection reads."""
    total = torch.linalg.vector_norm(need(view.raw_written)[:, 1:], dim=-1)
    return wide(total).mean(-1) / _sum_of_norms(view)


@layer_metric(unit="ratio", range="[0, 1]", measure=NAME)
def compensation_unrelated(view: LayerView) -> Float[Tensor, " batch"]:
    """What compensation would be if the heads wrote at right angles to each other: mean over i >= 1 of sqrt(sum_h
    norm(W_O^h w_i^h)^2), over mean of sum_h norm(W_O^h w_i^h). 1/sqrt(H) for H heads of equal norms. A compensation
    below it means that heads cancel."""
    squares = view.over_heads(wide(view.written_norms[..., 1:]).square().mean(1)) * view.layer_heads
    return squares.sqrt().mean(-1) / _sum_of_norms(view)


@once_per_view
def openness(view: LayerView) -> Rows:
    """norm(W_O^h o_i) / m of every query i >= 1; NaN where m is 0."""
    size = wide(view.written_value_norms[..., 1:]).mean(-1, keepdim=True)
    return wide(attended_norms(view)) / torch.where(size > 0, size, torch.nan)


@once_per_view
def off(view: LayerView) -> Bool[Tensor, "batch head row"]:
    """Whether a query i >= 1 is off."""
    return openness(view) < OFF


def sunk(view: LayerView) -> Bool[Tensor, "batch head row"]:
    """Whether a query i >= 1 is sunk."""
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
    energy = wide(attended_norms(view)).square().sum(-1)
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
    total = view.layer_mean(wide(view.written_norms[..., 1:]).mean(-1))[:, 0] * view.layer_heads
    return torch.where(total > 0, total, torch.nan)


def _share(rows: Bool[Tensor, "batch head row"], known: Rows) -> HeadValues:
    return _known(wide(rows).mean(-1), known)


def _known(values: Tensor, rows: Tensor) -> Tensor:
    """The values; NaN where one of the rows they come from is missing."""
    return torch.where(rows.isnan().any(-1), torch.nan, values)


def _variance(share: Tensor) -> Tensor:
    return share * (1 - share)
