"""What is read of one tensor of tokens: norms, cosines, peaks and moments, one number a token.

A compiled loop reads them all at once on a CPU; elsewhere torch computes each when it is first asked for.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.precision import as_widest

Tokens = Float[Tensor, "batch token channel"]
KURTOSIS_ROWS = 128


class TokenSums:
    """The facts of the tokens x_j of one tensor, in its dtype."""

    def __init__(self, x: Tokens) -> None:
        self._x = x

    @cached_property
    def norms(self) -> Float[Tensor, "batch token"]:
        """norm x_j."""
        return torch.linalg.vector_norm(self._x, dim=-1)

    @cached_property
    def products(self) -> Float[Tensor, "batch token"]:
        """x_j . x_0."""
        return torch.einsum("btd,bd->bt", self._x, self._x[:, 0])

    @cached_property
    def first_cosines(self) -> Float[Tensor, "batch token"]:
        """cos(x_j, x_0); 0 where one of them is 0."""
        return self.products * inverse(self.norms) * inverse(self.norms[:, :1])

    @cached_property
    def unit_sum(self) -> tuple[Float[Tensor, "batch channel"], Float[Tensor, " batch"]]:
        """The sum of x_j / norm x_j over j >= 1, and the number of tokens in it: those of norm 0 are left out."""
        return self._unit_sum(self._x.shape[1])

    @cached_property
    def pair_cosine(self) -> Float[Tensor, " batch"]:
        """Mean cosine of unordered pairs of tokens >= 1: (|sum of unit vectors|^2 - n) / (n (n - 1))."""
        return self._pair_cosine(self._x.shape[1])

    def pair_cosine_of(self, length: int) -> Float[Tensor, " batch"]:
        """pair_cosine of the first `length` tokens, whose norms are known already."""
        return self.pair_cosine if length == self._x.shape[1] else self._pair_cosine(length)

    def _pair_cosine(self, length: int) -> Float[Tensor, " batch"]:
        count = length - 1
        if count < 2:
            return torch.full_like(self.norms[:, 0], torch.nan)
        total, counted = self.unit_sum if length == self._x.shape[1] else self._unit_sum(length)
        return (total.square().sum(-1) - counted) / (count * (count - 1))

    def _unit_sum(self, length: int) -> tuple[Float[Tensor, "batch channel"], Float[Tensor, " batch"]]:
        weights = inverse(self.norms[:, 1:length])
        return torch.einsum("bt,btd->bd", weights, self._x[:, 1:length]), (weights > 0).sum(-1).to(weights.dtype)

    @cached_property
    def peaks(self) -> Float[Tensor, "batch token"]:
        """Largest abs element of x_j."""
        return self._x.abs().amax(-1)

    @cached_property
    def kurtosis(self) -> Float[Tensor, "batch token"]:
        """Excess kurtosis of the elements of x_j; NaN where they are all equal."""
        return kurtosis(self._x)


def token_sums(x: Tokens, whole: bool = False) -> TokenSums:
    """Reads the tokens of x. `whole`: peaks and kurtosis will be asked for too."""
    sums, loop = TokenSums(x), loops.loops_over("vectors", x, x.shape[1] * x.shape[2])
    if loop is not None:
        loops.fill(sums, _read(loop, x, whole))
    return sums


def _read(loop: ModuleType, x: Tokens, whole: bool) -> dict[str, Any]:
    sequences, tokens, width = x.shape
    facts, units = torch.empty(4, sequences, tokens), torch.empty(sequences, 1, width + 1)
    loops.run(loop.read_tokens, loops.in_rows(x), whole, facts.numpy(), units.numpy())
    unit_sum = units[:, 0, :-1], units[:, 0, -1]
    found = {"norms": facts[loop.NORM], "products": facts[loop.PRODUCT], "unit_sum": unit_sum}
    return {**found, "peaks": facts[loop.PEAK], "kurtosis": facts[loop.KURTOSIS]} if whole else found


def kurtosis(x: Float[Tensor, "... channel"]) -> Float[Tensor, "..."]:  # noqa: UP037
    """Excess kurtosis, in float64 where the device has it: near 0, subtracting 3 leaves few digits of a float32. A CPU
    takes KURTOSIS_ROWS tokens at a time, which its caches hold: three times as fast as all at once."""
    rows = x.reshape(-1, x.shape[-1])
    pieces = rows.split(KURTOSIS_ROWS) if x.device.type == "cpu" else (rows,)
    found = []
    for piece in pieces:
        exact = as_widest(piece)
        squares = (exact - exact.mean(-1, keepdim=True)).square_()
        second = squares.mean(-1)
        found.append(squares.square_().mean(-1) / second.square() - 3.0)
    return torch.cat(found).view(x.shape[:-1])


def inverse(norms: Tensor) -> Tensor:
    """1 / norm; 0 for a zero vector, so that its cosines are 0."""
    return torch.where(norms > 0, norms.reciprocal(), 0.0)
