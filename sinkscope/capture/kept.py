"""Keeps a tensor of somebody else's model by reference, and tells whether something was written into it since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.bits import bit_sums
from sinkscope.capture.private_doors import times_written


@dataclass(frozen=True, eq=False)
class Kept:
    """A tensor, and how often it had been written into when it was kept. `sums`: of its bits, where it is a part of a
    tensor that is written into piece by piece, such as one cache for all layers; torch counts the writes of the whole.
    """

    tensor: Tensor
    written: int
    sums: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        """Keeps a tensor as it is; torch counts no writes in inference mode."""
        written = times_written(tensor)
        if _AS_OF:
            written = _AS_OF.get(tensor.untyped_storage().data_ptr(), written)
        part = written > 0 and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        return cls(tensor.detach() if tensor.requires_grad else tensor, written, bit_sums(tensor) if part else None)

    @classmethod
    def safe(cls, tensor: Tensor) -> Kept:
        """Keeps a tensor that a model may well write into: in inference mode, a copy."""
        if not tensor.is_inference():
            return cls.of(tensor)
        copy = tensor.clone()  # outside inference mode, torch counts copying as the first write
        return cls(copy, times_written(copy))

    @property
    def unwritten(self) -> Tensor | None:
        """The tensor as it was; None where something was written into it since."""
        same = times_written(self.tensor) == self.written
        if not same and self.sums is not None:
            same = torch.equal(bit_sums(self.tensor), self.sums)
        return self.tensor if same else None


_AS_OF: dict[int, int] = {}
"""By the place of a tensor's memory: how often it had been written into at the time that it is kept as of."""


@contextmanager
def as_of(tensors: Iterable[tuple[Tensor, int]]) -> Iterator[None]:
    """Lets `Kept.of` take each of these tensors for one that was written into so many times, until the block ends.
    `unwritten` then tells of what was written since."""
    places = {tensor.untyped_storage().data_ptr(): written for tensor, written in tensors}
    _AS_OF.update(places)
    try:
        yield
    finally:
        for place in places:
            _AS_OF.pop(place, None)


def stream_kept(hidden: Any) -> Kept | None:
    """Keeps hidden states of three axes; None for anything else: hyper-connections have several residual streams."""
    plain = isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.is_floating_point()
    return Kept.safe(hidden) if plain else None
