"""What each pass over a cache leaves of one tensor, such as the queries of an attention call, until the sequence ends.

Each step leaves some hundred small tensors. Between them, the tensors of the cache grow and move with every step. On a
CPU, their old places then lie between small ones that are in use, and the process becomes many times as large as all
that it holds. So `pack` copies the small ones into blocks, and full blocks out of the heap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.heard import Kept
from sinkscope.capture.shelf import Shelf, Shelved

SMALL = 2**16
"""The bytes up to which a tensor is put beside others; larger ones leave no gaps worth the copy."""

TOGETHER = 64
"""Tensors in a block. On an accelerator, whose memory has no such gaps, those of as many passes are copied at once."""

OPEN = 4
"""Blocks of several shapes that are filled at a time: a draft may bring one to some tokens in a pass."""

_Numbers = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
"""Where a tensor's numbers are in memory, and how it reads them."""


class Block:
    """Tensors of one shape in one piece, on its first axis; `count` are there. `kept`: tells of one that stays where it
    is whether something is written into it."""

    def __init__(self, tensors: Tensor | Shelved, count: int, kept: Kept | None = None) -> None:
        self._tensors = tensors
        self.count = count
        self._kept = kept

    def add(self, tensor: Tensor) -> None:
        """Copies a tensor into the next place."""
        assert isinstance(self._tensors, Tensor)
        self._tensors[self.count].copy_(tensor)
        self.count += 1

    def close(self, shelf: Shelf) -> Tensor | None:
        """Copies a block to a shelf, and returns the memory where it was; None where it has no bytes, and stays
        there."""
        room = self._tensors
        if not isinstance(room, Tensor) or not room.nbytes:
            return None
        self._tensors = shelf.copy(room[: self.count])
        return room

    def tensors(self, start: int, stop: int) -> tuple[Tensor, ...] | None:
        """Those from `start` to before `stop`; None where something was written into them since."""
        if self._kept is not None and self._kept.unwritten is None:
            return None
        held = self._tensors
        return (held[start:stop] if isinstance(held, Tensor) else held.tensor(start, stop)).unbind()


@dataclass
class _Run:
    """Passes whose tensors follow one another in a block, from its place `start` to before `stop`."""

    block: Block
    start: int
    stop: int


Placed = dict[_Numbers, tuple[Block, int]]
"""The place of each tensor's copy."""


class Rows:
    """One tensor for each pass, or nothing, where a pass had none or something was written into one since."""

    def __init__(self) -> None:
        self.passes = 0
        self._shape: torch.Size | None = None
        self._missing = False
        self._loose: list[Tensor | Kept] = []
        self._runs: list[_Run] = []
        self._met: set[tuple[torch.Size, torch.dtype]] = set()
        self._open: dict[tuple[torch.Size, torch.dtype], Block] = {}

    def add(self, kept: Tensor | Kept | None) -> None:
        """Adds that of the next pass."""
        self.passes += 1
        if kept is None:
            self.let_go()
        elif not self._missing:
            self._loose.append(kept)
            if self._shape is None:
                self._shape = _tensor(kept).shape

    @property
    def shape(self) -> torch.Size | None:
        """That of the first pass; None where a pass had none."""
        return None if self._missing else self._shape

    @property
    def pieces(self) -> list[Tensor] | None:
        """The tensor of each pass; None where one is missing, or where they were let go."""
        loose = self._read_loose()
        if self._missing:
            return None
        found = [run.block.tensors(run.start, run.stop) for run in self._runs]
        if any(tensors is None for tensors in found):
            self.let_go()
            return None
        return [tensor for tensors in found for tensor in tensors or ()] + loose

    def let_go(self) -> None:
        """Keeps no tensor any more."""
        self._missing = True
        self._loose, self._runs, self._open = [], [], {}

    def pack(self, placed: Placed, shelf: Shelf) -> None:
        """Puts the tensors since the last time into blocks, full ones on `shelf`. `placed`: those of other rows, which
        most often hold some of the same numbers: an output projection reads the attention's output."""
        if not self._loose:
            return
        accelerated = _tensor(self._loose[0]).device.type != "cpu"
        if accelerated and len(self._loose) < TOGETHER:
            return
        loose = self._read_loose()
        if accelerated:
            _stack(loose, placed)
        last = self._runs[-1] if self._runs else None
        for kept, tensor in zip(self._loose, loose, strict=True):
            block, place = self._place(kept, tensor, placed, shelf)
            if last is not None and last.block is block and last.stop == place:
                last.stop += 1
            else:
                last = _Run(block, place, place + 1)
                self._runs.append(last)
        self._loose = []

    def _place(self, kept: Tensor | Kept, tensor: Tensor, placed: Placed, shelf: Shelf) -> tuple[Block, int]:
        if type(tensor) is not Tensor:  # what libraries make of tensors may not be copied so
            return Block(tensor[None], 1, kept if isinstance(kept, Kept) else None), 0
        numbers = _numbers(tensor)
        if numbers not in placed:
            placed[numbers] = self._copied(tensor, shelf)
        return placed[numbers]

    def _copied(self, tensor: Tensor, shelf: Shelf) -> tuple[Block, int]:
        if tensor.nbytes > SMALL:
            large = shelf.put(tensor[None])
            return Block(large, 1, Kept.of(tensor) if isinstance(large, Tensor) else None), 0
        key = tensor.shape, tensor.dtype
        if key not in self._met:  # a prompt has a shape of its own, most often
            self._met.add(key)
            return Block(tensor[None].clone(), 1), 0
        block = self._open.pop(key, None)
        if block is None and len(self._open) == OPEN:
            self._open.pop(next(iter(self._open))).close(shelf)
        if block is None or block.count == TOGETHER:
            room = None if block is None else block.close(shelf)
            block = Block(tensor.new_empty(TOGETHER, *tensor.shape) if room is None else room, 0)
        self._open[key] = block
        block.add(tensor)
        return block, block.count - 1

    def _read_loose(self) -> list[Tensor]:
        found = list[Tensor]()
        for kept in self._loose:
            tensor = kept.unwritten if isinstance(kept, Kept) else kept
            if tensor is None:
                self.let_go()
                return []
            found.append(tensor)
        return found


def _tensor(kept: Tensor | Kept) -> Tensor:
    return kept.tensor if isinstance(kept, Kept) else kept


def _stack(tensors: list[Tensor], placed: Placed) -> None:
    """Copies the small ones of some tensors at once; those of one shape stand in one block."""
    alike: dict[tuple[object, ...], dict[_Numbers, Tensor]] = {}
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.nbytes <= SMALL and (numbers := _numbers(tensor)) not in placed:
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), {})[numbers] = tensor
    for group in alike.values():
        block = Block(torch.stack([*group.values()]), len(group))
        placed.update({numbers: (block, place) for place, numbers in enumerate(group)})


def pack(every: Iterable[Rows], shelf: Shelf) -> None:
    """Packs the rows of all calls; see `Rows.pack`."""
    placed: Placed = {}
    with torch.no_grad(), torch.inference_mode(False):
        for rows in every:
            rows.pack(placed, shelf)


def _numbers(tensor: Tensor) -> _Numbers:
    shape = tensor.shape
    steps = tuple([step if size > 1 else 0 for size, step in zip(shape, tensor.stride(), strict=True)])
    return tensor.device, tensor.data_ptr(), shape, steps, tensor.dtype, tensor.is_neg(), tensor.is_conj()
