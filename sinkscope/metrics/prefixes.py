"""Mean cosines of a prefix's tokens: those of layers.csv over the first n tokens of the same pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.view import LayerView, Missing, need
from sinkscope.metrics.residual import cosines_with_first, pair_cosine

Tokens = Float[Tensor, "batch token channel"]
PrefixValues = Float[Tensor, " batch"]


def pair_residual(view: LayerView, length: int) -> PrefixValues:
    """avg_cos_residual over the first `length` tokens."""
    x = _first(view.x, view, length)
    return pair_cosine(x, view.x_norms[:, :length])


def pair_input(view: LayerView, length: int) -> PrefixValues:
    """avg_cos_input over the first `length` tokens."""
    z = _first(need(view.attention_input), view, length)
    return pair_cosine(z, torch.linalg.vector_norm(z, dim=-1))


def first_residual(view: LayerView, length: int) -> PrefixValues:
    """cos_first_residual over the first `length` tokens."""
    x = _first(view.x, view, length)
    return cosines_with_first(x, view.x_norms[:, :length])[:, 1:].mean(-1)


def first_input(view: LayerView, length: int) -> PrefixValues:
    """cos_first_input over the first `length` tokens."""
    z = _first(need(view.attention_input), view, length)
    return cosines_with_first(z, torch.linalg.vector_norm(z, dim=-1))[:, 1:].mean(-1)


COSINES: dict[str, Callable[[LayerView, int], Tensor]] = {
    "avg_cos_residual": pair_residual,
    "avg_cos_input": pair_input,
    "cos_first_residual": first_residual,
    "cos_first_input": first_input,
}
"""By the name of the column of layers.csv that it equals at the whole length."""


def _first(tokens: Tokens, view: LayerView, length: int) -> Float[Tensor, "batch early channel"]:
    """The first tokens. Raises Missing where the block's tokens are not the queries."""
    if tokens.shape[1] != view.queries:
        raise Missing
    return tokens[:, :length]
