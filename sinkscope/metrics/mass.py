"""Attention mass: how much of each query's attention goes to the first token, to itself, and how spread it is.

All values are per query head. In layers with a sliding window or chunks, and over a cache that dropped key 0, queries
that cannot reach key 0 give it mass 0 and stay in every mean of A[i,0]; only `sink_margin`, a logarithm, leaves them
out. `first_visible` says how many can reach it. alpha_k is the mean over the n_k
queries that may see key k: T - k in a causal layer and T in a bidirectional one, fewer where the mask hides keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.view import LayerView, Missing, once_per_mask, once_per_view
from sinkscope.metrics.registry import head_metric

GU = "Gu et al. 2410.10781"
LAMPERT = "Lampert et al. 2605.08453"
TAIL = 64

HeadValues = Float[Tensor, "batch head"]


@head_metric(unit="probability", range="[0, 1]", source="ours", dormant="high", map_place=1)
def bos_mass(view: LayerView) -> HeadValues:
    """Mean over queries i = 1..T-1 of A[i,0]. Query 0 is left out, because in causal heads it sees no other key."""
    return mean_rows(view.attention.first[..., 1:])


@head_metric(unit="probability", range="[0, 1]", source=GU, dormant="high", map_place=1)
def sink_score(view: LayerView) -> HeadValues:
    """alpha_0: 1/T sum_i A[i,0], query 0 included. A query that may not see key 0, as under a window, counts as 0."""
    return mean_rows(view.attention.first)


@head_metric(unit="share", range="[0, 1]", source=GU, dormant="high", map_place=1)
def sink_rate(view: LayerView) -> HeadValues:
    """1 in a sequence with alpha_0 > epsilon, else 0. The table shows the mean over sequences: the share of sequences
    with a sink. Where sequences are so short that uniform attention exceeds epsilon too, it says nothing about
    sinks."""
    return (sink_score(view) > view.epsilon).float()


@head_metric(unit="probability", range="[0, 1]", source=GU, dormant="high")
def sink_score_t64(view: LayerView) -> HeadValues:
    """sink_score over the first 64 queries of the same pass. In causal heads it equals sink_score in a run at T = 64.
    Empty where T < 64."""
    return mean_rows(view.attention.first[..., :EARLY]) if view.queries >= EARLY else _nan(view)


@head_metric(unit="share", range="[0, 1]", source=GU, dormant="high")
def sink_rate_t64(view: LayerView) -> HeadValues:
    """1 in a sequence with sink_score_t64 > epsilon, else 0. The table shows the mean over sequences. Empty where T <
    64."""
    return (sink_score_t64(view) > view.epsilon).float() if view.queries >= EARLY else _nan(view)


@head_metric(unit="positions", range="[0, T]", source="ours")
def sinks_per_sequence(view: LayerView) -> HeadValues:
    """Number of keys k with alpha_k > epsilon. Only keys that enough queries see are counted: n_k >= n_max/4."""
    return ((alpha(view) > view.epsilon) & keys_ranked(view)).float().sum(-1)


@head_metric(unit="share", range="[0, 1]", source="Kaul et al. 2410.17174", dormant="high", map_place=2)
def first_argmax(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that give key 0 their largest A[i,j]. A tie with another key counts as key 0. A query
    that may not see key 0 counts as one that prefers another key."""
    return mean_rows(view.attention.first_is_largest[..., 1:].float())


@head_metric(
    unit="nats", range="(-inf, inf)", source=f"{LAMPERT} (margin kappa); estimator ours", dormant="high", map_place=1
)
def sink_margin(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of log(A[i,0] / (1 - A[i,0])), computed from the logits and not clipped. Two kinds of queries
    are left out: those that cannot see key 0, and those that see only key 0 in a head without a learned sink. Empty
    where attention is no softmax."""
    return view.attention.margin[..., 1:].nanmean(-1)


@head_metric(unit="probability", range="[0, 1]", source=LAMPERT, map_place=3)
def self_mass(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of A[i,i], the diagonal pattern. Empty in cross-attention."""
    return mean_rows(_own(view, view.attention.diagonal)[..., 1:])


@head_metric(unit="probability", range="[0, 1]", source="ours", map_place=3)
def previous_mass(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of A[i,i-1], the previous-token pattern. Empty in cross-attention."""
    return mean_rows(_own(view, view.attention.previous)[..., 1:])


@head_metric(
    unit="nats", range="[0, log T]", source="Sandoval-Segura et al. 2504.03889 (AEQD)", dormant="low", map_place=2
)
def entropy(view: LayerView) -> HeadValues:
    """Mean over all queries i, query 0 included, of -sum_j A[i,j] log A[i,j]. A learned sink is no key and not in the
    sum. Empty where attention is no softmax."""
    return mean_rows(view.attention.entropy)


@head_metric(
    unit="ratio",
    range="[0, 1]",
    source="ours (in place of Lampert et al. eq. 12, which we could not read)",
    dormant="low",
    map_place=2,
)
def uniformity(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of (-sum_j A[i,j] log A[i,j]) / log(number of keys that i may see): 1 where i attends equally to
    all of them. Queries that see at most one key are left out. Empty where attention is no softmax."""
    visible = view.attention.visible[..., 1:]
    ratio = view.attention.entropy[..., 1:] / visible.to(view.attention.entropy.dtype).log()
    return torch.where(visible > 1, ratio, torch.nan).nanmean(-1)


@head_metric(unit="probability", range="[0, 1]", source="ours", dormant="high")
def learned_sink_mass(view: LayerView) -> HeadValues:
    """Mean over all queries i of 1 - sum_j A[i,j]: the mass that a learned sink logit takes, as in gpt-oss, or a
    learned key that belongs to no token. It is 0 in a softmax without one, also for a query that sees no key. Empty
    where attention is no softmax, and where rows of a model's own map sum to less than 1 and their logits were not
    seen."""
    return mean_rows(view.attention.learned_sink)


@head_metric(unit="probability", range="[0, 1]", source="ours", dormant="high")
def tail_mass(view: LayerView) -> HeadValues:
    """Mean over the last 64 queries of A[i,0]. Where T <= 64, mean over i = 1..T-1."""
    return mean_rows(view.attention.first[..., max(1, view.queries - TAIL) :])


@head_metric(unit="share", range="[0, 1]", source="ours")
@once_per_mask
def first_visible(view: LayerView) -> HeadValues:
    """Share of queries i >= 1 that may see key 0: no mask or window hides it, and no cache has dropped it. In bos_mass
    the other queries count as 0, so bos_mass / first_visible is the mean of A[i,0] over the queries that may see key
    0."""
    seen = mean_rows(view.attention.sees_first[..., 1:].float())
    return seen.expand(view.batch, view.heads)


@once_per_view
def alpha(view: LayerView) -> Float[Tensor, "batch head key"]:
    """alpha_k of every key: the mean attention it receives from the queries that may see it; NaN where none may (Gu et
    al. 2410.10781, who know no window)."""
    return received(view.attention.columns, view.attention.seen_by)


def received(columns: Tensor, seen_by: Tensor) -> Tensor:
    """alpha_k from the column sums of A, and the number n_k of queries that may see each key."""
    return columns / seen_by.to(columns.dtype)


@once_per_mask
def keys_ranked(view: LayerView) -> Bool[Tensor, "b h key"]:
    """Which keys of a view are `ranked`."""
    return ranked(view.attention.seen_by)


def ranked(seen_by: Int[Tensor, "b h key"]) -> Bool[Tensor, "b h key"]:
    """The keys that at least a quarter as many queries see as the key that most see: n_k >= n_max/4. A mean over fewer
    is too noisy to call a peak."""
    return 4 * seen_by >= seen_by.amax(-1, keepdim=True)


def mean_rows(rows: Tensor) -> Tensor:
    """Mean over the last dimension; NaN where it is empty."""
    return rows.mean(-1)


def _own(view: LayerView, rows: Tensor | None) -> Tensor:
    """Rows that pair a query with a key by their positions, which says nothing where the keys are another sequence's,
    however long that is."""
    if rows is None or view.site.cross:
        raise Missing
    return rows


def _nan(view: LayerView) -> Tensor:
    return torch.full_like(view.attention.first[..., 0], torch.nan)
