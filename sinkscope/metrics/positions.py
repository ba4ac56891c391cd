"""By position and prefix length: attention mass of every query head, who may see each key, and uniform attention's
mass.

Windows and bidirectional layers are treated as in `mass`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView, Missing, need, once_per_mask
from sinkscope.metrics import mass
from sinkscope.metrics.events import keys_counted
from sinkscope.metrics.mass import keys_ranked
from sinkscope.metrics.quantities import quantity

HeadValues = Float[Tensor, "batch head"]


@quantity("sequence", "head", "key", unit="probability", range="[0, 1]", source=mass.GU)
def alpha(view: LayerView) -> Float[Tensor, "batch head key"]:
    """alpha_k of the key k at the position, mean over the sequences in which some query may see it. Empty where there
    is no such sequence."""
    return mass.alpha(view)


@quantity("sequence", "head", "early", unit="probability", range="[0, 1]", source=mass.GU, column="alpha_t64")
def early_alpha(view: LayerView) -> Float[Tensor, "batch head early"]:
    """alpha_k of the key k at the position, k < 64, over the first 64 queries only, mean over the sequences in which
    some of them may see it. Empty where T < 64, and where there is no such sequence."""
    columns = need(view.attention.early_columns)
    assert view.attention.early_seen_by is not None
    return mass.received(columns, view.attention.early_seen_by)


@quantity("sequence", "head", "query", unit="probability", range="[0, 1]", column="bos_mass")
def first(view: LayerView) -> Float[Tensor, "batch head query"]:
    """A[i,0] of the query i at the position. Empty in cross-attention, where positions are those of keys."""
    return _by_query(view, view.attention.first)


@quantity("sequence", "head", "query", unit="share", range="[0, 1]", source=mass.GU, column="bos_share")
def first_share(view: LayerView) -> Float[Tensor, "batch head query"]:
    """|A[i,0]| / sum_j |A[i,j]| of the query i at the position; 0 where the whole row is 0. Empty in
    cross-attention."""
    return _by_query(view, view.attention.first_share)


def _by_query(view: LayerView, rows: Tensor) -> Tensor:
    if view.site.cross:
        raise Missing
    return rows


@quantity("sequence", "head", "length", unit="probability", range="[0, 1]", column="bos_mass")
def curve_bos_mass(view: LayerView, length: int) -> HeadValues:
    """bos_mass over the first `length` queries."""
    return mass.mean_rows(view.attention.first[..., 1:length])


@quantity("sequence", "head", "length", unit="probability", range="[0, 1]", source=mass.GU, column="sink_score")
def curve_sink_score(view: LayerView, length: int) -> HeadValues:
    """sink_score over the first `length` queries."""
    return mass.mean_rows(view.attention.first[..., :length])


@quantity("sequence", "head", "length", unit="share", range="[0, 1]", source=mass.GU, column="sink_rate")
def curve_sink_rate(view: LayerView, length: int) -> HeadValues:
    """sink_rate over the first `length` queries."""
    return (as_widest(curve_sink_score(view, length)) > view.epsilon).float()


# Who may see each key: what a run keeps of it, so that its tables know which keys enough queries see.
#
# n_k is the number of queries that may see key k, n_max the largest n_k of the sequence in the head.


Stretches = Float[Tensor, "event 4"]
"""Rows of (sequence, head, first key, one past the last key). The head is NaN where all heads share a mask."""


@quantity("event", "coordinate", unit="-", range="-", internal=True)
@once_per_mask
def ranked_keys(view: LayerView) -> Stretches:
    """The stretches of keys with n_k >= n_max/4, among which a peak is looked for."""
    return _stretches(view, keys_ranked(view))


@quantity("event", "coordinate", unit="-", range="-", internal=True)
@once_per_mask
def counted_keys(view: LayerView) -> Stretches:
    """The stretches of keys with n_k >= max(16, n_max/16), which can be a sink of sinks.parquet."""
    return _stretches(view, keys_counted(view))


@quantity("sequence", "head", "key", unit="-", range="-", internal=True)
@once_per_mask
def unseen_keys(view: LayerView) -> Float[Tensor, "batch head key"]:
    """1 for a key that no query may see, else 0. Missing where every key is seen, as under an order or a window: only
    attention that picks its keys leaves some out."""
    return _unseen(view, view.attention.seen_by)


@quantity("sequence", "head", "early", unit="-", range="-", internal=True)
@once_per_mask
def early_unseen_keys(view: LayerView) -> Float[Tensor, "batch head early"]:
    """The same among the first 64 queries, for as many keys."""
    need(view.attention.early_columns)
    assert view.attention.early_seen_by is not None
    return _unseen(view, view.attention.early_seen_by)


def _unseen(view: LayerView, seen_by: Tensor) -> Tensor:
    none = seen_by == 0
    if not bool(none.any()):
        raise Missing
    return as_widest(none).expand(view.batch, view.heads, -1)


@quantity("sequence", "coordinate", "key", unit="-", range="-", internal=True)
@once_per_mask
def seeing_queries(view: LayerView) -> Float[Tensor, "batch 2 key"]:
    """n_k and its square: a mean over sequences tells both n_k and whether it is the same in all. Missing where heads
    have masks of their own."""
    if view.attention.seen_by.shape[1] > 1:
        raise Missing
    counts = as_widest(view.attention.seen_by).expand(view.batch, -1, -1)
    return torch.cat([counts, counts.square()], 1)


@quantity("sequence", "coordinate", unit="-", range="-", internal=True)
@once_per_mask
def hidden_keys(view: LayerView) -> Float[Tensor, "batch 1"]:
    """1 where the mask hides some key from a query that the causal order, if there is one, lets see it."""
    steps = torch.arange(view.keys, device=view.attention.seen_by.device)
    allowed = view.queries - steps if view.attention.causal else view.queries
    hidden = (view.attention.seen_by < allowed).flatten(1).any(1, keepdim=True)
    return as_widest(hidden.expand(view.batch, -1))


def _stretches(view: LayerView, chosen: Bool[Tensor, "b h key"]) -> Stretches:
    """The stretches of chosen keys of every sequence, and of every head where heads have masks of their own."""
    inside = pad(chosen.expand(view.batch, -1, -1).int(), (1, 1))
    change = inside.diff(dim=-1)
    sequence, head, first = (change > 0).nonzero().T
    past = (change < 0).nonzero()[:, 2]
    rows = as_widest(torch.stack([sequence, head, first, past], 1))
    if chosen.shape[1] == 1:
        rows[:, 1] = torch.nan
    return rows


# The baseline of every sink score: what alpha_0 would be if each query attended alike to all keys it may see.


@quantity("sequence", "head", "coordinate", unit="probability", range="[0, 1]", internal=True)
@once_per_mask
def uniform_alpha_0(view: LayerView) -> Float[Tensor, "batch head 2"]:
    """alpha_0 of uniform attention over all queries, and over the first 64 (NaN where T < 64): the mean over queries i
    (0 included) of 1 / (number of keys that i may see), with 0 for a query that cannot see key 0.

    It is H_T / T (harmonic number) in a causal head, 1 / keys where every query sees all keys, and less under a window.
    """
    sums = view.attention
    shares = torch.where(sums.sees_first, as_widest(sums.visible).clamp(min=1).reciprocal(), 0.0)
    early = mass.mean_rows(shares[..., :EARLY])
    if view.queries < EARLY:
        early = torch.full_like(early, torch.nan)
    return torch.stack([mass.mean_rows(shares), early], -1).expand(view.batch, view.heads, 2)
