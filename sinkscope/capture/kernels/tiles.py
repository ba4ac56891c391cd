"""How the Triton kernels cut a call: a fixed table by dtype and width, and which tiles have anything to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile in both kernels, channels multiplied at once, warps and pipeline stages."""

    queries: int
    keys: int
    slice: int
    warps: int
    stages: int


def tiles(dtype: torch.dtype, width: int) -> Tiles:
    """By dtype and the widest of q, k and v, filled up to a power of two. Fixed, not tuned: the same bytes each time.

    Compiled for sm_86 and sm_90, each keeps its sums in registers (a hundred bytes spilt, or none) and stays within
    the 99 KiB of shared memory of the smaller one: larger tiles would read keys less often, but not fit wide heads.
    Float32 products run without tensor cores, from registers, 32 channels at a time.
    """
    if dtype == torch.float32:
        return Tiles(64, 32, 32, 4 if width <= 128 else 8, 1)
    if width <= 128:
        return Tiles(128, 64 if width <= 64 else 32, width, 8, 2)
    return Tiles(64, 32, width, 8, 2)


def power(width: int) -> int:
    """The next power of two, at least the 16 that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def met(hidden: Bool[Tensor, "b h query key"], cut: Tiles) -> Bool[Tensor, "query_block key_block"]:
    """Which tiles hold a pair that some sequence and head sees."""
    pairs = ~hidden.all(dim=1).all(dim=0)
    pairs = pad(pairs, (0, -pairs.shape[1] % cut.keys, 0, -pairs.shape[0] % cut.queries))
    return pairs.unflatten(1, (-1, cut.keys)).any(-1).unflatten(0, (-1, cut.queries)).any(1)


def met_without_mask(
    rows: range, columns: range, triangle: bool, cut: Tiles, device: torch.device
) -> Bool[Tensor, "query_block key_block"]:
    """The same for queries `rows` and keys `columns` where a query sees every key, or none later than itself."""
    last = torch.arange(rows.start, rows.stop, cut.queries, device=device)[:, None] + (cut.queries - 1)
    first = torch.arange(columns.start, columns.stop, cut.keys, device=device)
    return first <= last if triangle else torch.ones(len(last), len(first), dtype=torch.bool, device=device)


def reach(tiles_met: Bool[Tensor, "block other"]) -> Int[Tensor, "block two"]:
    """From which to which block of the other kind each block has something to do; nothing at all is 0 to 0."""
    index = torch.arange(tiles_met.shape[1], device=tiles_met.device)
    last = torch.where(tiles_met, index + 1, 0).amax(1)
    first = torch.where(tiles_met, index, tiles_met.shape[1]).amin(1)
    return torch.stack([torch.minimum(first, last), last], 1).int()
