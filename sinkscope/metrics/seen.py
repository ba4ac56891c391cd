"""Who may see each key: what a run keeps of it, so that its tables know which keys enough queries see.

n_k is the number of queries that may see key k, n_max the largest n_k of the sequence in the head.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView, Missing
from sinkscope.metrics.events import counted
from sinkscope.metrics.mass import ranked
from sinkscope.metrics.quantities import quantity

Stretches = Float[Tensor, "event 4"]
"""Rows of (sequence, head, first key, one past the last key). The head is NaN where all heads share a mask."""


@quantity("event", "coordinate", unit="-", range="-", internal=True)
def ranked_keys(view: LayerView) -> Stretches:
    """The stretches of keys with n_k >= n_max/4, among which a peak is looked for."""
    return _stretches(view, ranked(view.attention.seen_by))


@quantity("event", "coordinate", unit="-", range="-", internal=True)
def counted_keys(view: LayerView) -> Stretches:
    """The stretches of keys with n_k >= max(16, n_max/16), which can be a sink of sinks.parquet."""
    return _stretches(view, counted(view.attention.seen_by))


@quantity("sequence", "coordinate", "key", unit="-", range="-", internal=True)
def seeing_queries(view: LayerView) -> Float[Tensor, "batch 2 key"]:
    """n_k and its square: a mean over sequences tells both n_k and whether it is the same in all. Missing where heads
    have masks of their own."""
    if view.attention.seen_by.shape[1] > 1:
        raise Missing
    counts = as_widest(view.attention.seen_by).expand(view.batch, -1, -1)
    return torch.cat([counts, counts.square()], 1)


@quantity("sequence", "coordinate", unit="-", range="-", internal=True)
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
