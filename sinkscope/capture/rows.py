"""What each pass over a cache leaves of its tensors, such as the queries of an attention call, until the sequence ends.

Each step leaves some hundred small tensors. Between them, the tensors of the cache grow and move with every step. On a
CPU, their old places then lie between small ones that are in use, and the process becomes many times as large as all
that it holds. So `Store.pack` copies the small tensors of a pass into one row of a table, and full tables out of the
heap. One copy for all of them also costs a step less than one for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.kept import Kept
from sinkscope.capture.shelf import Shelf, Shelved

SMALL = 2**16
"""The bytes up to which a tensor is put beside others; larger ones leave no gaps worth the copy."""

TOGETHER = 64
"""The passes in a table."""

ROOM = 2**24
"""The bytes of a table, which then has fewer passes; it has one where this alone is larger."""

OPEN = 4
"""Tables that are filled at a time: a draft may bring one to some tokens in a pass, each number with other shapes."""

_Kind = tuple[torch.Size, torch.dtype, torch.device]
"""What tensors have alike that stand in one column."""

_Memory = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
"""Where a tensor's numbers are in memory, and how it reads them."""


class _Column:
    """Tensors of one shape, one behind another on the first axis. `kept`: tells of one that stays where it is whether
    something is written into it."""

    def __init__(self, held: Tensor | Shelved, kept: Kept | None = None) -> None:
        self._held = held
        self._kept = kept

    def close(self, count: int, shelf: Shelf) -> None:
        """Copies the first `count` to a shelf."""
        if isinstance(self._held, Tensor) and self._held.device.type == "cpu" and self._held[:count].nbytes:
            self._held = shelf.copy(self._held[:count])

    def tensors(self, start: int, stop: int) -> Tensor | None:
        """Those from `start` to before `stop`, along the first axis; None where something was written into them
        since."""
        if self._kept is not None and self._kept.unwritten is None:
            return None
        held = self._held
        return held[start:stop] if isinstance(held, Tensor) else held.tensor(start, stop)


@dataclass
class _Run:
    """Passes that follow one another in a table, from its row `start` to before `stop`."""

    start: int
    stop: int


class Rows:
    """One tensor for each pass, or nothing, where a pass had none or something was written into one since. `taken`:
    gets these rows whenever they get a tensor."""

    def __init__(self, taken: list[Rows]) -> None:
        self.passes = 0
        self._taken = taken
        self._shape: torch.Size | None = None
        self._missing = False
        self._loose: list[Tensor | Kept] = []
        self._runs: list[tuple[_Column, _Run]] = []

    def add(self, kept: Tensor | Kept | None) -> None:
        """Adds that of the next pass."""
        self.passes += 1
        if kept is None:
            self.let_go()
        elif not self._missing:
            self._loose.append(kept)
            self._taken.append(self)
            if self._shape is None:
                self._shape = (kept.tensor if isinstance(kept, Kept) else kept).shape

    @property
    def shape(self) -> torch.Size | None:
        """That of the first pass; None where a pass had none."""
        return None if self._missing else self._shape

    @property
    def stacks(self) -> list[Tensor] | None:
        """The tensors of passes that followed one another and had one shape, along a first axis, in order; None where
        one is missing, or where they were let go."""
        loose = [kept.unwritten if isinstance(kept, Kept) else kept for kept in self._loose]
        found = [column.tensors(run.start, run.stop) for column, run in self._runs]
        found += [None if tensor is None else tensor[None] for tensor in loose]
        if any(stack is None for stack in found):
            self.let_go()
        return None if self._missing else [stack for stack in found if stack is not None]

    @property
    def pieces(self) -> list[Tensor] | None:
        """The tensor of each pass; None where one is missing, or where they were let go."""
        stacks = self.stacks
        return None if stacks is None else [piece for stack in stacks for piece in stack.unbind()]

    def let_go(self) -> None:
        """Keeps no tensor any more."""
        self._missing = True
        self._loose, self._runs = [], []

    def take_loose(self) -> tuple[Rows, Tensor, Kept | None] | None:
        """Hands over the tensor of the last pass, with these rows and what tells whether something is written into it;
        None where they were let go."""
        if not self._loose:
            return None
        kept = self._loose.pop()
        if not isinstance(kept, Kept):
            return self, kept, None
        tensor = kept.unwritten
        if tensor is None:
            self.let_go()
            return None
        return self, tensor, kept

    def go_on(self, column: _Column, run: _Run) -> None:
        """The tensors of the next passes are in `column`."""
        self._runs.append((column, run))


class Store:
    """The rows of one batch of sequences."""

    def __init__(self) -> None:
        self._shelf = Shelf()
        self._taken: list[Rows] = []
        self._tables: list[_Table] = []
        self._last: _Table | None = None
        self._met: set[tuple[_Kind, ...]] = set()

    def rows(self) -> Rows:
        """Rows for one more tensor of each pass."""
        return Rows(self._taken)

    def pack(self) -> None:
        """Puts the tensors of a pass that has ended into a table, full tables on the shelf."""
        taken, self._taken[:] = [rows.take_loose() for rows in self._taken], []
        found = [each for each in taken if each is not None]
        owners, tensors = [each[0] for each in found], [each[1] for each in found]
        with torch.no_grad(), torch.inference_mode(False):
            table = self._last
            if table is None or not table.fits(owners, tensors):
                small = [each for each in found if are_copied(each[1])]
                for owner, tensor, kept in found:
                    if not are_copied(tensor):
                        owner.go_on(self._apart(tensor, kept), _Run(0, 1))
                owners, tensors = [each[0] for each in small], [each[1] for each in small]
                table = self._table(owners, tensors) if tensors else None
            if table is not None:
                table.add(tensors, table is self._last)
            self._last = table

    def _apart(self, tensor: Tensor, kept: Kept | None) -> _Column:
        large = self._shelf.put(tensor[None]) if tensor.nbytes > SMALL else tensor[None]
        return _Column(large, (kept or Kept.of(tensor)) if isinstance(large, Tensor) else None)

    def _table(self, owners: list[Rows], tensors: list[Tensor]) -> _Table:
        """The table for the tensors of a pass."""
        table = next((table for table in self._tables if table.fits(owners, tensors)), None)
        if table is None:
            kinds: list[_Kind] = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            table = _Table(owners, tensors, kinds, self._shelf, tuple(kinds) in self._met)
            self._met.add(tuple(kinds))
        else:
            self._tables.remove(table)
        if len(self._tables) == OPEN:  # the one that was used longest ago
            self._tables.pop(0).close()
        self._tables.append(table)
        return table


class _Table:
    """The small tensors of passes of one kind: a row for each pass, and a column for each tensor. Those that show the
    same memory share a column: most often, an output projection reads the attention's output.

    `often`: such passes came before. The first is most often a prompt, whose shapes no other has: it gets one row."""

    def __init__(
        self, owners: list[Rows], tensors: list[Tensor], kinds: list[_Kind], shelf: Shelf, often: bool
    ) -> None:
        self._owners, self._kinds, self._shelf, self._often = owners, kinds, shelf, often
        first: dict[_Memory, int] = {}
        self._place = [first.setdefault(_memory(tensor), number) for number, tensor in enumerate(tensors)]
        self._twins = [(number, place) for number, place in enumerate(self._place) if number != place]
        self._parts: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place in first.values():
            self._parts.setdefault(kinds[place][1:], []).append(place)
        self._bytes = sum(tensors[place].nbytes for place in first.values())
        self._on_cpu = all(device.type == "cpu" for _, device in self._parts)
        self._rooms: list[Tensor] = []
        self._columns: dict[int, _Column] = {}
        self._count = self._size = 0
        self._run = _Run(0, 0)

    def fits(self, owners: list[Rows], tensors: list[Tensor]) -> bool:
        """Whether the tensors of a pass go into a row."""
        if owners != self._owners or not all(type(tensor) is Tensor for tensor in tensors):
            return False
        if [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] != self._kinds:
            return False
        return all(_share_memory(tensors[number], tensors[place]) for number, place in self._twins)

    def add(self, tensors: list[Tensor], follows: bool) -> None:
        """Copies the tensors of a pass into the next row. `follows`: the last pass is in the row before."""
        if self._count == self._size:
            self._begin(tensors)
            follows = False
        for room, places in zip(self._rooms, self._parts.values(), strict=True):
            torch.cat([tensors[place].reshape(-1) for place in places], out=room[self._count])
        if not follows:
            self._run = _Run(self._count, self._count)
            for owner, place in zip(self._owners, self._place, strict=True):
                owner.go_on(self._columns[place], self._run)
        self._count += 1
        self._run.stop = self._count

    def _begin(self, tensors: list[Tensor]) -> None:
        """Begins anew without rows. What is on the shelf leaves its memory to the next rows."""
        self.close()
        size = min(TOGETHER, max(1, ROOM // max(1, self._bytes))) if self._often else 1
        widths = [[tensors[place].numel() for place in places] for places in self._parts.values()]
        if size != self._size or not self._on_cpu:
            self._rooms = [
                torch.empty(size, sum(numbers), dtype=dtype, device=device)
                for numbers, (dtype, device) in zip(widths, self._parts, strict=True)
            ]
        for room, numbers, places in zip(self._rooms, widths, self._parts.values(), strict=True):
            for place, piece in zip(places, room.split(numbers, 1), strict=True):
                self._columns[place] = _Column(piece.view(size, *tensors[place].shape))
        self._often, self._count, self._size = True, 0, size

    def close(self) -> None:
        """Copies what is on a CPU to the shelf."""
        for column in self._columns.values():
            column.close(self._count, self._shelf)


def are_copied(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are copied where its pass ends; others stay where they are."""
    return type(tensor) is Tensor and tensor.nbytes <= SMALL


def _memory(tensor: Tensor) -> _Memory:
    """Where the numbers of a tensor are in memory, and how it reads them. The step along an axis of size 1 tells
    nothing."""
    shape = tensor.shape
    steps = tuple([step if size > 1 else 0 for size, step in zip(shape, tensor.stride(), strict=True)])
    return tensor.device, tensor.data_ptr(), shape, steps, tensor.dtype, tensor.is_neg(), tensor.is_conj()


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same kind show the same numbers of memory."""
    if one is other:
        return True
    if one.data_ptr() != other.data_ptr() or one.is_neg() != other.is_neg() or one.is_conj() != other.is_conj():
        return False
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or step == other_step for size, step, other_step in steps)
