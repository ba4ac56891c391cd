"""Integers by which tensors of the same bits are told: sums of their words, and numbers that tensors of other bits have
with a chance of about 2**-60."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.capture.loops import loops_over, run

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIP = 2**18
"""Elements that torch reads at a time, so that no temporary is as large as a weight, and each stays in the caches."""


def bit_sums(rows: Tensor) -> Int[Tensor, ...]:
    """The bits of the rows of the last axis as integers, summed modulo 2**64."""
    return _words(rows).sum(-1, dtype=torch.int64)


def _words(rows: Tensor) -> Int[Tensor, ...]:
    """The bits of the rows of the last axis as integers; of 64 bits each, where rows are made of such: torch adds and
    multiplies these several times as fast as narrower ones."""
    rows, size = rows.detach(), rows.element_size()
    bits, wide = _BITS[size], torch.int64.itemsize
    if size * rows.shape[-1] % wide == 0:
        at = (*rows.stride()[:-1], rows.storage_offset())
        fits = rows.stride(-1) == 1 and all(size * step % wide == 0 for step in at)
        rows, bits = rows if fits else rows.clone(memory_format=torch.contiguous_format), torch.int64
    return rows.view(bits)


def row_marks(rows: Tensor, seed: int = 0) -> Int[Tensor, ...]:
    """A number for each row of the last axis: its bits as integers, times random odd ones, summed modulo 2**64.

    The upper half of an integer is multiplied once more, by a factor of its own. Otherwise two changed signs would
    cancel: an odd multiple of 2**63 is 2**63.
    """
    words = _words(rows)
    found = torch.empty(words.shape[:-1], dtype=torch.int64, device=words.device)
    lines, marks = words.reshape(found.numel(), words.shape[-1]), found.view(-1)
    factors = _factors(words.shape[-1], seed, words.device)
    plain = words.dtype == torch.int64 and lines.is_contiguous()
    loop = loops_over("vectors", lines, lines.numel()) if plain else None
    if loop is not None:
        run(loop.read_marks, lines.numpy(), factors.numpy(), marks.numpy())
        return found
    strip = max(1, _STRIP // max(1, words.shape[-1]))
    for part, sums in zip(lines.split(strip), marks.split(strip), strict=True):
        numbers = part.long()
        torch.sum((numbers * factors[0]).add_((numbers >> 32).mul_(factors[1])), -1, out=sums)
    return found


@lru_cache(maxsize=32)
def _factors(width: int, seed: int, device: torch.device) -> Int[Tensor, "2 word"]:
    """The factors of a row's words and of their upper halves."""
    draw = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False):  # what is made in inference mode could not be used everywhere
        return (torch.randint(-(2**62), 2**62, (2, width), generator=draw) * 2 + 1).to(device)


def mark(matrix: Tensor) -> tuple[object, ...]:
    """What a matrix is told by: its shape, dtype and bits."""
    return tuple(matrix.shape), matrix.dtype, int(row_marks(row_marks(matrix), 1))


def marks(keys: Tensor, values: Tensor) -> Int[Tensor, "batch group token"]:
    """A number for each token and KV head that is the same for the same bits of key and value, and for others with a
    chance of about 2**-60."""
    return row_marks(keys, 0) + row_marks(values, 1)
