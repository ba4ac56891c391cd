"""What is read of one tensor of tokens, or of one layer's queries: norms, cosines, peaks and moments, one number a
token.

A compiled loop reads them all at once on a CPU; elsewhere torch computes each when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.capture import loops
from sinkscope.capture.kernels.sums import running_sum
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
        return self.products * self._inverses * self._inverses[:, :1]

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
        weights = self._inverses[:, 1:length].clone()
        return torch.einsum("bt,btd->bd", weights, self._x[:, 1:length]), (weights > 0).sum(-1).to(weights.dtype)

    @cached_property
    def _inverses(self) -> Float[Tensor, "batch token"]:
        return inverse(self.norms)

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
    sums = {"norms": facts[loop.NORM], "products": facts[loop.PRODUCT], "unit_sum": unit_sum}
    return {**sums, "peaks": facts[loop.PEAK], "kurtosis": facts[loop.KURTOSIS]} if whole else sums


def kurtosis(x: Float[Tensor, "... channel"]) -> Float[Tensor, "..."]:  # noqa: UP037
    """Excess kurtosis, in float64 where the device has it: near 0, subtracting 3 leaves few digits of a float32. A CPU
    takes KURTOSIS_ROWS tokens at a time, which its caches hold: three times as fast as all at once."""
    rows = x.reshape(-1, x.shape[-1])
    pieces = rows.split(KURTOSIS_ROWS) if x.device.type == "cpu" else (rows,)
    kurtoses = []
    for piece in pieces:
        exact = as_widest(piece)
        squares = (exact - exact.mean(-1, keepdim=True)).square_()
        second = squares.mean(-1)
        kurtoses.append(squares.square_().mean(-1) / second.square() - 3.0)
    return torch.cat(kurtoses).view(x.shape[:-1])


def inverse(norms: Tensor) -> Tensor:
    """1 / norm; 0 for a zero vector, so that its cosines are 0."""
    return torch.where(norms > 0, norms.reciprocal(), 0.0)


# What is read of one layer's queries: norms, and the sums from which cosines with keys follow.
#
# A compiled loop reads them all at once on a CPU; elsewhere torch computes each when it is first asked for.


Queries = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch group key dim"]


class QuerySums:
    """The facts of the queries q_i of one layer. `key`: the layer's keys, as many as there are queries, where query i
    sees keys 0 to i; else None."""

    def __init__(self, query: Queries, key: Keys | None) -> None:
        self._query, self._key = query, key

    @cached_property
    def norms(self) -> Float[Tensor, "batch head query"]:
        """norm q_i."""
        return torch.linalg.vector_norm(self._query, dim=-1)

    @cached_property
    def unit_sum(self) -> Float[Tensor, "batch head dim"]:
        """The sum of q_i / norm q_i over i >= 1; a query of norm 0 adds 0."""
        return self._units[:, :, 1:].sum(2)

    @cached_property
    def paired(self) -> Float[Tensor, "batch head"] | None:
        """The sum of cos(q_i, k_j) over pairs 1 <= j <= i; None without keys."""
        if self._key is None:
            return None
        keys = normalize(self._key, dim=-1)
        keys[:, :, 0] = 0.0
        grouped = self._units.unflatten(1, (keys.shape[1], -1))
        return (grouped.flatten(3) @ running_sum(keys).flatten(2).unsqueeze(-1)).flatten(1)

    @cached_property
    def _units(self) -> Queries:
        """q_i / norm q_i, contiguous, so that one product with a vector sums rows and channels."""
        empty = torch.empty(self._query.shape, dtype=self._query.dtype, device=self._query.device)
        return torch.mul(self._query, inverse(self.norms).unsqueeze(-1), out=empty)


def query_sums(query: Queries, key: Keys | None) -> QuerySums:
    """Reads the queries, and with `key` their cosines with keys. See QuerySums."""
    sums, loop = QuerySums(query, key), loops.loops_over("vectors", query, query.shape[2] * query.shape[3])
    if loop is not None:
        loops.fill(sums, _read_queries(loop, query, key))
    return sums


def _read_queries(loop: ModuleType, query: Queries, key: Keys | None) -> dict[str, Tensor | None]:
    batch, heads, queries, width = query.shape
    groups = heads if key is None else key.shape[1]
    shape = (batch, groups, heads // groups)
    norms, units = torch.empty(*shape, queries), torch.empty(*shape, width)
    paired = torch.zeros(shape, dtype=torch.float64)
    keys = query[:, :, :1] if key is None else key  # not read where it is None
    by_token = loops.in_rows(query.transpose(1, 2).unflatten(2, (groups, -1))), loops.in_rows(keys.transpose(1, 2))
    loops.run(loop.read_queries, *by_token, key is not None, norms.numpy(), units.numpy(), paired.numpy())
    return {
        "norms": norms.flatten(1, 2),
        "unit_sum": units.flatten(1, 2),
        "paired": None if key is None else paired.flatten(1, 2).float(),
    }
