"""Sums every query's attention over groups of keys, such as the tokens of each speaker, block by block."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.sums import block_edges
from sinkscope.capture.kernels.unnormalised import UnnormalisedWalk, walk_of
from sinkscope.capture.kernels.walk import Walk
from sinkscope.capture.masks.visibility import BlockMask


def group_masses(
    call: AttentionCall | AttentionMap, groups: Int[Tensor, "batch key"], count: int
) -> Float[Tensor, "batch head query group"]:
    """The sum of A[i, j] over the keys j of each of `count` groups, in float32 (float64 for a float64 model).

    `groups`: the number of each key's group, from 0 on; a key of a negative number belongs to none.
    """
    member = torch.nn.functional.one_hot(groups.clamp(min=0), count) * (groups >= 0).unsqueeze(-1)
    if isinstance(call, AttentionMap):
        return _of_map(call, member)
    batch, heads, queries, _ = call.query.shape
    shared, keys = call.key.shape[1:3]
    walk = walk_of(call.score, _MassWalk, _UnnormalisedMassWalk)(call, batch, shared, heads // shared, queries, keys)
    walk.member = member.to(device=call.query.device, dtype=walk.dtype)[:, None, None]
    walk.masses = walk.first.new_zeros(*walk.first.shape, count)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device):
        walk.block(start, stop)
    return walk.masses.flatten(1, 2)


def _of_map(seen: AttentionMap, member: Tensor) -> Tensor:
    """From a map that the model formed. Probabilities in half precision are recomputed from their logits."""
    batch, heads, queries, keys = seen.probabilities.shape
    weights = member.to(device=seen.probabilities.device, dtype=seen.dtype)[:, None]
    edges = block_edges(queries, batch * heads * keys * 4, seen.probabilities.device)
    return torch.cat([seen.shares(slice(start, stop)) @ weights for start, stop in edges], 2)


class _MassWalk(Walk):
    """A walk that takes the sums over groups of keys in place of all others."""

    member: Tensor
    masses: Tensor

    def _row_sums(self, *_: Any) -> None:
        pass

    def _column_sums(self, *_: Any) -> None:
        pass

    def _output(self, rows: slice, seen: BlockMask, weights: Tensor, norm: Tensor) -> None:
        summed = weights @ self.member[..., seen.low : seen.high, :]
        self.masses[..., rows, :] = summed / norm.unsqueeze(-1)


class _UnnormalisedMassWalk(_MassWalk, UnnormalisedWalk):
    pass
