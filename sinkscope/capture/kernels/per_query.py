"""What questions ask of every query's attention, block by block: its sums over groups of keys, over windows, and by how
much it prefers key 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import HIDDEN_GAP, AttentionMap
from sinkscope.capture.kernels.sums import PAIR_MARGINS, block_edges
from sinkscope.capture.kernels.walk import FLOOR, UnnormalisedWalk, Walk, walk_of
from sinkscope.capture.masks.visibility import BlockMask


def group_masses(
    call: AttentionCall | AttentionMap, groups: Int[Tensor, "batch key"], count: int
) -> Float[Tensor, "batch head query group"]:
    """The sum of A[i, j] over the keys j of each of `count` groups, in float32 (float64 for a float64 model).

    `groups`: the number of each key's group, from 0 on; a key of a negative number belongs to none.
    """
    member = torch.nn.functional.one_hot(groups.clamp(min=0), count) * (groups >= 0).unsqueeze(-1)
    if isinstance(call, AttentionMap):
        return _masses_of_map(call, member)
    batch, heads, queries, _ = call.query.shape
    shared, keys = call.key.shape[1:3]
    walk = walk_of(call.score, _MassWalk, _UnnormalisedMassWalk)(call, batch, shared, heads // shared, queries, keys)
    walk.member = member.to(device=call.query.device, dtype=walk.dtype)[:, None, None]
    walk.masses = walk.first.new_zeros(*walk.first.shape, count)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device):
        walk.block(start, stop)
    return walk.masses.flatten(1, 2)


def _masses_of_map(seen: AttentionMap, member: Tensor) -> Tensor:
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


# By how much each query prefers key 0 to its next best key, block by block.


def pair_margins(call: AttentionCall | AttentionMap) -> Float[Tensor, "batch head query"] | None:
    """s_i0 - max s_ij over the other keys j that query i sees, in float32 (float64 for a float64 model).

    NaN for a query that does not see key 0, or sees nothing else. A learned sink is no key, and is left out. None where
    the score is not softmax, and where a map was formed by the model whose logits were not seen.
    """
    if isinstance(call, AttentionMap):
        return _margins_of_map(call)
    if call.score != "softmax":
        return None
    if PAIR_MARGINS in call.found:
        return call.found[PAIR_MARGINS]
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    walk = _PairWalk(call, batch, groups, heads // groups, queries, keys)
    walk.pairs = torch.full_like(walk.first, torch.nan)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device):
        walk.block(start, stop)
    return walk.pairs.flatten(1, 2)


def _margins_of_map(seen: AttentionMap) -> Tensor | None:
    if seen.logits is None or not seen.is_softmax(slice(None)):  # learned keys may stand in front
        return None
    logits = seen.logits[..., : seen.probabilities.shape[-1]].to(seen.dtype)
    shown = logits > seen.logits.to(seen.dtype).amax(-1, keepdim=True) - HIDDEN_GAP
    return _margins(logits.masked_fill(~shown, -torch.inf))


class _PairWalk(Walk):
    """A walk that takes these margins in place of all sums."""

    pairs: Tensor

    def block(self, start: int, stop: int) -> None:
        """Takes the margins of queries start..stop."""
        rows, seen, logits = self._begin(start, stop)
        if seen.low:
            return
        self._hide(logits, seen, -torch.inf)
        self.pairs[..., rows] = _margins(logits.masked_fill(logits <= FLOOR / 2, -torch.inf))


def _margins(logits: Tensor) -> Tensor:
    """From logits that are -inf where a query does not see a key."""
    if logits.shape[-1] < 2:
        return torch.full_like(logits[..., 0], torch.nan)
    margins = logits[..., 0] - logits[..., 1:].amax(-1)
    return margins.masked_fill(~margins.isfinite(), torch.nan)


# Splits the keys of every query into the first ones, a window of recent ones and the distant ones between them.
#
# A KV cache of StreamingLLM (Xiao et al. 2309.17453) keeps the first and the recent keys and forgets the distant ones.
# The sums here say what each region holds, block by block, never T x T.


@dataclass(frozen=True)
class Regions:
    """For query i, the keys i - window + 1 .. i are recent; of those before them, 0 .. first - 1 are first, the rest
    distant."""

    first: int
    window: int

    def cut(self, weights: Float[Tensor, "*rest query key"], start: int, low: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sums over the first, recent and distant keys, each [*rest, query], and leaves the weights of
        distant keys alone in `weights`. Its queries begin at `start`, its keys at `low`."""
        queries = torch.arange(start, start + weights.shape[-2], device=weights.device)[:, None]
        keys = torch.arange(low, low + weights.shape[-1], device=weights.device)
        total = weights.sum(-1)
        weights.masked_fill_(keys > queries - self.window, 0.0)
        recent = total - weights.sum(-1)
        early = weights[..., : max(0, self.first - low)]
        first = early.sum(-1)
        early.zero_()
        return first, recent, weights.sum(-1)


@dataclass
class RegionSums:
    """Sums over the three regions of every query's keys, in float32 (float64 for a float64 model).

    `first`, `recent`, `distant`: sum of A[i, j] over the region's keys. `distant_output`: sum of A[i, j] v_j over the
    distant keys; None where the values were not seen.
    """

    first: Float[Tensor, "batch head query"]
    recent: Float[Tensor, "batch head query"]
    distant: Float[Tensor, "batch head query"]
    distant_output: Float[Tensor, "batch query head vdim"] | None


def region_sums(call: AttentionCall | AttentionMap, regions: Regions) -> RegionSums:
    """The sums of one attention call of as many queries as keys."""
    if isinstance(call, AttentionMap):
        return _regions_of_map(call, regions)
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    walk = walk_of(call.score, _SplitWalk, _UnnormalisedSplitWalk)(call, batch, groups, heads // groups, queries, keys)
    walk.split = _Split(regions, walk)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device):
        walk.block(start, stop)
    return walk.split.finish()


def _regions_of_map(seen: AttentionMap, regions: Regions) -> RegionSums:
    """From a map that the model formed. Probabilities in half precision are recomputed from their logits."""
    batch, heads, queries, keys = seen.probabilities.shape
    sums = seen.probabilities.new_zeros(3, batch, heads, queries, dtype=seen.dtype)
    value = None if seen.value is None else seen.value.to(seen.dtype).repeat_interleave(heads // seen.value.shape[1], 1)
    output = None if value is None else value.new_zeros(batch, queries, heads, value.shape[-1])
    for start, stop in block_edges(queries, 2 * batch * heads * keys * 4, seen.probabilities.device):
        shares = seen.shares(slice(start, stop)).clone()
        sums[..., start:stop] = torch.stack(regions.cut(shares, start, 0))
        if output is not None and value is not None:
            output[:, start:stop] = (shares @ value).transpose(1, 2)
    first, recent, distant = sums.unbind()
    return RegionSums(first, recent, distant, output)


class _Split:
    """The sums of a walk, which `add` fills block by block. Row sums are (B, G, R, query)."""

    def __init__(self, regions: Regions, walk: Walk) -> None:
        self.regions, self.walk = regions, walk
        self.first, self.recent, self.distant = (torch.zeros_like(walk.first) for _ in range(3))
        batch, queries, groups, repeat, width = walk.out.shape
        self.output = walk.first.new_zeros(batch, groups, repeat, queries, width)

    def add(self, rows: slice, seen: BlockMask, weights: Tensor, norm: Tensor) -> None:
        sums = self.regions.cut(weights, rows.start, seen.low)
        for target, values in zip((self.first, self.recent, self.distant), sums, strict=True):
            target[..., rows] = values / norm
        flat = weights.reshape(self.walk.value_rows.shape[0], -1, weights.shape[-1])
        mixed = torch.bmm(flat, self.walk.value_rows[:, seen.low : seen.high])
        self.output[..., rows, :] = mixed.view(*weights.shape[:-1], -1) / norm.unsqueeze(-1)

    def finish(self) -> RegionSums:
        first, recent, distant = (sums.flatten(1, 2) for sums in (self.first, self.recent, self.distant))
        return RegionSums(first, recent, distant, self.output.flatten(1, 2).transpose(1, 2))


class _SplitWalk(Walk):
    """A walk that takes the sums over regions in place of all others."""

    split: _Split

    def _row_sums(self, *_: Any) -> None:
        pass

    def _column_sums(self, *_: Any) -> None:
        pass

    def _output(self, rows: slice, seen: BlockMask, weights: Tensor, norm: Tensor) -> None:
        self.split.add(rows, seen, weights, norm)


class _UnnormalisedSplitWalk(_SplitWalk, UnnormalisedWalk):
    pass
