"""Puts what is kept of many small steps into few pieces of memory.

Each step over a cache leaves some hundred small tensors, which stay until the sequence ends. Between them, the tensors
of the cache grow and move with every step. On a CPU, their old places then lie between small ones that are in use, and
the process becomes many times as large as all that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SMALL = 2**16
"""The bytes up to which a tensor is put beside others; larger ones leave no gaps worth the copy."""

Place = Callable[[Tensor], Tensor]
"""Gives the tensor that stands for another one from now on; itself where that stays where it is."""


def pack(holders: list[Callable[[Place], None]]) -> None:
    """Copies small tensors of one shape, type and device into one piece of memory, each once.

    A holder takes a Place, and puts what it gives in the place of every tensor that it holds.
    """
    met = dict[int, Tensor]()

    def note(tensor: Tensor) -> Tensor:
        met[id(tensor)] = tensor
        return tensor

    for hold in holders:
        hold(note)
    together = _together(met.values())
    for hold in holders:
        hold(lambda tensor: together.get(id(tensor), tensor))


def _together(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """By the id of each small tensor, its copy beside those that are like it."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.nbytes <= SMALL:  # what libraries make of tensors may not stack
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)
    copies = dict[int, Tensor]()
    with torch.no_grad(), torch.inference_mode(False):
        for group in alike.values():
            copies |= zip(map(id, group), torch.stack(group).unbind(), strict=True)
    return copies
