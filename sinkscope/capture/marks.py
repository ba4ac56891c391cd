"""Numbers that are the same for tensors of the same bits, and for others with a chance of about 2**-60."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIP = 2**20
"""Elements read at a time, so that no temporary is as large as a weight."""


def row_marks(rows: Tensor, seed: int = 0) -> Int[Tensor, ...]:
    """A number for each row of the last axis: its bits as integers, times random odd ones, summed modulo 2**64."""
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()]).long()
    draw = torch.Generator().manual_seed(seed)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[-1],), generator=draw) * 2 + 1
    return (bits * factors.to(rows.device)).sum(-1)


def mark(matrix: Tensor) -> tuple[object, ...]:
    """What a matrix is told by: its shape, dtype and bits."""
    strips = matrix.split(max(1, _STRIP // max(1, matrix.shape[1])))
    marks = torch.cat([row_marks(strip) for strip in strips])
    return tuple(matrix.shape), matrix.dtype, int(row_marks(marks, 1))
