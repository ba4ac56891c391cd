"""What is read of one layer's queries: norms, and the sums from which cosines with keys follow.

A compiled loop reads them all at once on a CPU; elsewhere torch computes each when it is first asked for.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.capture import loops
from sinkscope.capture.token_sums import inverse

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
        return (grouped.flatten(3) @ keys.cumsum(2).flatten(2).unsqueeze(-1)).flatten(1)

    @cached_property
    def _units(self) -> Queries:
        """q_i / norm q_i, contiguous, so that one product with a vector sums rows and channels."""
        empty = torch.empty(self._query.shape, dtype=self._query.dtype, device=self._query.device)
        return torch.mul(self._query, inverse(self.norms).unsqueeze(-1), out=empty)


def query_sums(query: Queries, key: Keys | None) -> QuerySums:
    """Reads the queries, and with `key` their cosines with keys. See QuerySums."""
    sums, loop = QuerySums(query, key), loops.loops_over("vectors", query, query.shape[2] * query.shape[3])
    if loop is not None:
        loops.fill(sums, _read(loop, query, key))
    return sums


def _read(loop: ModuleType, query: Queries, key: Keys | None) -> dict[str, Tensor | None]:
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
