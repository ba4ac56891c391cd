"""What the projections of an attention module read: what the module was given, or what a norm inside it makes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReadInside:
    """The hidden states that the linear layers inside a module read, before its first attention call.

    `path`: of the layer that read something else than what the module was given. `layers`: whether any layer read
    hidden states of the same sequences and positions.
    """

    def __init__(self) -> None:
        self.layers = False
        self.path: str | None = None
        self._of_given = self._mixed = False
        self._other: Tensor | None = None

    def add(self, given: object, path: str, read: object) -> bool:
        """Takes note of what the linear layer at `path` reads. Returns whether these are hidden states of the sequences
        and positions of those that the module was `given`."""
        if not isinstance(given, Tensor) or not isinstance(read, Tensor) or given.dim() != 3:
            return False
        if _same(given, read):
            self.layers = self._of_given = True
            return True
        if read.dim() != 3 or read.shape[:2] != given.shape[:2] or not read.is_floating_point():
            return False
        self.layers = True
        if self._other is None:
            self._other, self.path = read, path
        self._mixed |= not (_same(self._other, read) or _equal(self._other, read))
        return True

    def tensor(self, given: Tensor | None) -> Tensor | None:
        """What the layers read: what was given where one of them reads that, or none reads hidden states; else what all
        of them read; None where they read several things."""
        if self._of_given or self._other is None:
            return given
        return None if self._mixed else self._other


def reading_path(model: nn.Module, path: str) -> str:
    """The module whose layers project what the attention module at `path` attends with: itself, or the one around it
    where it has no weights of its own and is handed q, k and v."""
    while path and next(model.get_submodule(path).parameters(), None) is None:
        path = path.rpartition(".")[0]
    return path


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, in whatever shape."""
    if a is b:
        return True
    try:
        return a.data_ptr() == b.data_ptr() != 0 and a.numel() == b.numel() and a.dtype == b.dtype
    except RuntimeError:  # a tensor without storage
        return False


def _equal(a: Tensor, b: Tensor) -> bool:
    return not a.is_meta and not b.is_meta and a.shape == b.shape and torch.equal(a, b.to(a.device))
