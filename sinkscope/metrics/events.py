"""Which tokens are sinks: every sink as an event of its own (a row of sinks.parquet), and what heads give keys near or
beyond the first.

alpha_k is that of `mass`, over the n_k queries that may see key k; n_max is the largest n_k. A key counts where n_k is
at least max(16, n_max/16): a mean over fewer rows is easily large by chance. So a head without a window has at most
16 / epsilon such keys in a sequence of 256 tokens or more.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.capture.masks.visibility import FEW
from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView, Missing, once_per_mask, once_per_view
from sinkscope.metrics import mass
from sinkscope.metrics.quantities import quantity
from sinkscope.metrics.registry import head_metric
from sinkscope.metrics.residual import SUN, massive_bound
from sinkscope.runs.defaults import STATE_COSINE, STATE_NORM

FEWEST_ROWS, ROWS_SHARE = 16, 16
"""A key counts where at least this many queries see it, and a 16th as many as see the key that most see."""

HeadValues = Float[Tensor, "batch head"]
Events = Float[Tensor, "event field"]


@head_metric(unit="probability", range="[0, 1]", source="Xiao et al. 2309.17453 (four sink tokens); estimator ours")
def first4_mass(view: LayerView) -> HeadValues:
    """Mean over all queries i = 0..T-1 of the sum of A[i,k] over the keys k < 4. In causal heads, the first four
    queries see no other keys. So compare it with uniform attention: see first4_boost."""
    return view.attention.columns[..., :FEW].sum(-1) / view.queries


@head_metric(unit="ratio", range="[0, inf)", source="ours")
def first4_boost(view: LayerView) -> HeadValues:
    """first4_mass divided by its value under uniform attention. That value is the mean over all queries i of (number of
    keys k < 4 that i may see) / (number of keys that i may see). Empty where attention is no softmax."""
    _need_softmax(view)
    return first4_mass(view) / _uniform_first4(view).to(view.attention.columns.dtype)


@once_per_mask
def _uniform_first4(view: LayerView) -> Float[Tensor, "b h"]:
    """first4_mass under uniform attention, in the widest type."""
    visible, few = as_widest(view.attention.visible), as_widest(view.attention.sees_few)
    return mass.mean_rows(few / visible.clamp(min=1))


@head_metric(unit="share", range="[0, 1]", source=f"{mass.GU} (alpha_k, threshold); ours")
def sink_elsewhere(view: LayerView) -> HeadValues:
    """1 in a sequence with a sink beyond the first token, else 0: alpha_k > epsilon at a key k >= 1 that enough queries
    see, n_k >= max(16, n_max/16). The table shows the mean over sequences. Empty where no key k >= 1 is seen by enough
    queries, and where attention is no softmax."""
    later = _sinks(view)[..., 1:]
    exists = keys_counted(view)[..., 1:].any(-1)
    return torch.where(exists, later.any(-1).to(view.attention.columns.dtype), torch.nan)


@quantity(
    "event", "field", unit="sink of one head in one sequence", range="-", source=f"{mass.GU} (alpha_k, threshold)",
    column="attention",
)  # fmt: skip
def attention_sinks(view: LayerView) -> Events:
    """alpha_k > epsilon in one head and sequence, for a key k that enough queries see, n_k >= max(16, n_max/16). The
    first token counts too. There is no such row where attention is no softmax."""
    sequence, head, position = _sinks(view).nonzero().T
    state = _state_of_keys(view)
    return _events(sequence, head, position, mass.alpha(view)[sequence, head, position], state)


@quantity(
    "event", "field", unit="token of one layer in one sequence", range="-",
    source="Wong et al. 2512.22213 (secondary sinks); the bound on the norm is ours", column="state",
)  # fmt: skip
def state_sinks(view: LayerView) -> Events:
    """|cos(x_k, x_0)| > 0.9, and norm x_k is more than 5 times the median of norm x_j over the sequence's tokens j. The
    first token counts too."""
    alike, large = view.x_sums.first_cosines.abs() > STATE_COSINE, norm_ratios(view) > STATE_NORM
    return _tokens(view, alike & large)


@quantity("event", "field", unit="token of one layer in one sequence", range="-", source=SUN, column="massive")
def massive_sinks(view: LayerView) -> Events:
    """x_k has an element whose absolute value is above 100 and above 1000 times the median absolute value of the
    elements of x in the sequence. The first token counts too."""
    return _tokens(view, view.x_peaks > massive_bound(view)[:, None])


@once_per_view
def norm_ratios(view: LayerView) -> Float[Tensor, "batch token"]:
    """Norm x_k over the median norm of the sequence's tokens; the mean of the two middle norms for an even count."""
    ordered = view.x_norms.sort(-1).values
    count = ordered.shape[-1]
    middle = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    return view.x_norms / middle[:, None]


@once_per_mask
def keys_counted(view: LayerView) -> Bool[Tensor, "b h key"]:
    """Which keys of a view are `counted`."""
    return counted(view.attention.seen_by)


def counted(seen_by: Int[Tensor, "b h key"]) -> Bool[Tensor, "b h key"]:
    """The keys that enough queries see for a sink: n_k >= max(16, n_max/16)."""
    return (seen_by >= FEWEST_ROWS) & (ROWS_SHARE * seen_by >= seen_by.amax(-1, keepdim=True))


@once_per_view
def _sinks(view: LayerView) -> Bool[Tensor, "batch head key"]:
    """Whether alpha_k > epsilon, for a key that counts."""
    _need_softmax(view)
    return (mass.alpha(view) > view.epsilon) & keys_counted(view)


def _need_softmax(view: LayerView) -> None:
    """Raises Missing where attention is unnormalised weights, which no threshold fits."""
    if view.site.score != "softmax" or not view.attention.of_shares:
        raise Missing


@once_per_view
def _state(view: LayerView) -> Float[Tensor, "batch token 3"]:
    """cos_first, max_abs and norm_ratio of every token entering the layer."""
    return torch.stack([view.x_sums.first_cosines, view.x_peaks, norm_ratios(view)], -1)


def _state_of_keys(view: LayerView) -> Tensor | None:
    """`_state` where the keys are the layer's own tokens; None where they are others', or x was not seen."""
    if view.site.cross or view.residual_in is None or view.residual_in.shape[1] != view.keys:
        return None
    return _state(view)


def _tokens(view: LayerView, found: Bool[Tensor, "batch token"]) -> Events:
    """Events of the layer's own tokens, of no head. Raises Missing in cross-attention, whose positions are others'."""
    if view.site.cross:
        raise Missing
    sequence, position = found.nonzero().T
    missing = torch.full_like(view.x_norms[sequence, position], torch.nan)
    return _events(sequence, missing, position, missing, _state(view))


def _events(sequence: Tensor, head: Tensor, position: Tensor, alpha: Tensor, state: Tensor | None) -> Events:
    """One row an event, with the fields of EVENT_FIELDS; `state` [batch, token, 3]."""
    if state is None:
        measured = alpha.new_full((len(alpha), 3), torch.nan)
    else:
        measured = state[sequence, position].to(alpha.dtype)
    return torch.cat(
        [torch.stack([column.to(alpha.dtype) for column in (sequence, head, position, alpha)], -1), measured], 1
    )
