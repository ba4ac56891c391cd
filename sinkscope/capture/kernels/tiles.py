"""How the Triton kernels cut a call into tiles, and which tiles hold a pair that is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Tiles:
    """A tile's queries and keys in both kernels, the channels multiplied at once, the warps, and the pipeline stages of
    `row_sums` and of `column_sums`."""

    queries: int
    keys: int
    slice: int
    warps: int
    stages: int
    column_stages: int


def tiles(dtype: torch.dtype, width: int, masked: bool) -> Tiles:
    """The tile for a dtype and a width: the largest of q, k and v, rounded up to a power of two. `masked`: a mask or a
    bias is read beside the keys.

    The choice is fixed, not tuned at run time, so that results are the same bytes each time. docs/speed.md says what
    it takes. A tile of 128 queries would read keys half as often, but spills registers. A second stage, which loads
    keys while others are multiplied, spills in `row_sums` where a mask is loaded ahead as well. Float32 products run
    without tensor cores, from registers, a slice of the channels at a time. So do the widest heads, whose channels do
    not fit into shared memory together.
    """
    if dtype == torch.float32:
        if width > 256:
            return Tiles(32, 16, 32, 8, 1, 1)
        if width > 128:
            return Tiles(64, 32, 32, 8, 1, 1)
        return Tiles(64, 32, 16, 4, 1, 1) if width <= 64 else Tiles(64, 16, 16, 8, 1, 1)
    if width > 256:
        return Tiles(32, 32, 64, 8, 1, 1)
    return Tiles(64, 32, width, 8, 1 if masked and width > 64 else 2, 2)


def power(width: int) -> int:
    """The smallest power of two that is at least `width` and at least 16, the minimum of a matrix product in Triton."""
    return max(16, 1 << (width - 1).bit_length())


def visible_tiles(hidden: Bool[Tensor, "b h query key"], cut: Tiles) -> Bool[Tensor, "query_block key_block"]:
    """Which tiles hold a pair (query, key) that is seen in some sequence and head."""
    pairs = ~hidden.all(dim=1).all(dim=0)
    pairs = pad(pairs, (0, -pairs.shape[1] % cut.keys, 0, -pairs.shape[0] % cut.queries))
    return pairs.unflatten(1, (-1, cut.keys)).any(-1).unflatten(0, (-1, cut.queries)).any(1)


def visible_tiles_without_mask(
    rows: range, columns: range, triangle: bool, cut: Tiles, device: torch.device
) -> Bool[Tensor, "query_block key_block"]:
    """Which tiles of queries `rows` and keys `columns` hold a pair that is seen. A query sees every key, or with
    `triangle` every key that is not later than itself."""
    last = torch.arange(rows.start, rows.stop, cut.queries, device=device)[:, None] + (cut.queries - 1)
    first = torch.arange(columns.start, columns.stop, cut.keys, device=device)
    return first <= last if triangle else torch.ones(len(last), len(first), dtype=torch.bool, device=device)


def reach(visible: Bool[Tensor, "block other"]) -> Int[Tensor, "block two"]:
    """For each block of queries, the first and the end of the key blocks that it sees (or, transposed, the query blocks
    of each key block); 0 and 0 where there are none."""
    index = torch.arange(visible.shape[1], device=visible.device)
    last = torch.where(visible, index + 1, 0).amax(1)
    first = torch.where(visible, index, visible.shape[1]).amin(1)
    return torch.stack([torch.minimum(first, last), last], 1).int()
