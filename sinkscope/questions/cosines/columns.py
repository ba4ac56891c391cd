"""Mean cosines of a prefix's tokens: those of layers.csv over the first n tokens of the same pass."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.token_sums import Tokens, TokenSums
from sinkscope.capture.view import LayerView, Missing

PrefixValues = Float[Tensor, " batch"]


def pair_residual(view: LayerView, length: int) -> PrefixValues:
    """avg_cos_residual over the first `length` tokens."""
    return _of_queries(view.x_sums, view.x, view).pair_cosine_of(length)


def pair_input(view: LayerView, length: int) -> PrefixValues:
    """avg_cos_input over the first `length` tokens."""
    return _of_queries(view.z_sums, view.z, view).pair_cosine_of(length)


def first_residual(view: LayerView, length: int) -> PrefixValues:
    """cos_first_residual over the first `length` tokens."""
    return _of_queries(view.x_sums, view.x, view).first_cosines[:, 1:length].mean(-1)


def first_input(view: LayerView, length: int) -> PrefixValues:
    """cos_first_input over the first `length` tokens."""
    return _of_queries(view.z_sums, view.z, view).first_cosines[:, 1:length].mean(-1)


COSINES: dict[str, Callable[[LayerView, int], Tensor]] = {
    "avg_cos_residual": pair_residual,
    "avg_cos_input": pair_input,
    "cos_first_residual": first_residual,
    "cos_first_input": first_input,
}
"""By the name of the column of layers.csv that it equals at the whole length."""


def _of_queries(sums: TokenSums, tokens: Tokens, view: LayerView) -> TokenSums:
    """Raises Missing where the block's tokens are not the queries."""
    if tokens.shape[1] != view.queries:
        raise Missing
    return sums
