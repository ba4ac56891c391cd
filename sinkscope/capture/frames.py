"""The modules whose forwards run in a pass that is heard, one inside another, and what surrounds attention in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.axes import given_several
from sinkscope.capture.heard import Around, Pass
from sinkscope.capture.hooks import first_returned
from sinkscope.capture.kept import Kept, stream_kept
from sinkscope.capture.read_inside import ReadInside
from sinkscope.capture.uncalled import is_stream


@dataclass(eq=False, slots=True)
class Frame:
    """A module whose forward runs. `first`: the number of the next attention call when it began; `joint`, `last`,
    `read`, `reader`, `sizes` and `several`: see Around. `inputs`: what it was given, until then. `bare`: it has no
    weights.

    Of a block that the model never calls: `begins`, the first of its modules to run, and `again`, what this was given
    since in another call."""

    path: str
    given: Any
    first: int
    joint: bool = False
    begins: str | None = None
    again: Any = None
    kept: Kept | None = None
    last: bool | None = None
    bare: bool = False
    inside: ReadInside | None = None
    read: Kept | None = None
    reader: str | None = None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    sizes: torch.Size | None = None
    several: bool = False

    def around(self, past: int, output: Any) -> Around:
        """What surrounded the attention calls before number `past` in it, where it returns `output`."""
        hidden = first_returned(output)
        return Around(
            self.path, self.first, past, self.kept, stream_kept(hidden), self.joint, self.last, self.read, self.reader,
            self.sizes, self.several,
        )  # fmt: skip


_NOTHING = ReadInside()
"""Of a module in which no layer read anything yet."""


class Frames:
    """The frames that are open, the outermost first."""

    def __init__(self) -> None:
        self._open: list[Frame] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def outermost(self) -> str:
        """The path of the outermost module."""
        return self._open[0].path

    def clear(self) -> None:
        """Forgets all frames."""
        self._open.clear()

    def push(self, path: str, bare: bool) -> Frame:
        """Opens the frame of a module."""
        self._open.append(Frame(path, None, 0, bare=bare))
        return self._open[-1]

    def pop(self, path: str, now: Pass | None) -> Frame | None:
        """Closes the frame of a module, which is returned, and those of the blocks in it that are never called. None
        where another module runs."""
        depth = len(self._open)
        while depth and self._open[depth - 1].begins is not None:
            depth -= 1
        if not depth or self._open[depth - 1].path != path:
            return None
        for block in self._open[depth:]:
            _end(block, None, now)
        del self._open[depth:]
        return self._open.pop()

    def enter_uncalled(self, blocks: tuple[str, ...], member: str, hidden: Any, now: Pass) -> None:
        """Opens and closes blocks that the model never calls where it calls `member`, a module that all `blocks` hold.
        `hidden`: what this is given."""
        while self._open and self._open[-1].begins is not None and self._open[-1].path not in blocks:
            _end(self._open.pop(), hidden, now)
        open_ones = {frame.path: frame for frame in self._open if frame.begins is not None}
        for path in blocks if self._open else ():
            frame = open_ones.get(path)
            if frame is None:
                self._open.append(Frame(path, hidden, len(now.heard), begins=member))
            elif member == frame.begins:
                frame.again = hidden
            elif frame.kept is None and not is_stream(frame.given):
                frame.given = hidden

    def tell_axis(self, path: str, read: Any, last: bool) -> None:
        """Notes what a layer that begins reads, and on which axis it has channels, for the modules around it."""
        for frame in self._open[:-1]:
            if frame.given is None:  # it attended already
                continue
            if last and frame.inside is None:
                frame.inside = ReadInside()
            if (last and frame.inside and frame.inside.add(frame.given, path, read)) or frame.given is read is not None:
                frame.last = last

    def attends(self, now: Pass) -> None:
        """Keeps what the modules that run were given, and what their projections read, before the first attention call
        in each."""
        surrounding: Frame | None = None
        for frame in self._open:
            if frame.again is not None and self._goes_round(frame, now):
                _end(frame, frame.again, now)
            frame.again = None
            if frame.inputs is not None:
                frame.several, frame.inputs = given_several(*frame.inputs), None
            if frame.kept is None and isinstance(frame.given, Tensor):
                frame.sizes = frame.given.shape if now.idle is None else None  # of steps, nobody asks
                frame.kept = stream_kept(frame.given)
                inside = frame.inside or _NOTHING
                read = inside.tensor(frame.given)
                frame.read = frame.kept if read is frame.given else stream_kept(read)
                frame.reader = None if frame.read is frame.kept else inside.path
                if frame.bare and not inside.layers and surrounding is not None:
                    frame.read, frame.reader = surrounding.read, surrounding.reader
            frame.given, surrounding = None, frame

    def _goes_round(self, frame: Frame, now: Pass) -> bool:
        """Whether a block that the model never calls begins anew: a module in it attends again."""
        inside = {other.path for other in self._open}
        return any(heard.module in inside for heard in now.heard[frame.first :])


def _end(block: Frame, leaving: Any, now: Pass | None) -> None:
    """Keeps what surrounded the attention calls in a block that the model never calls, and begins it anew."""
    if now is None or len(now.heard) == block.first or block.kept is None:
        return
    same = is_stream(leaving) and leaving.shape == block.kept.tensor.shape
    now.around.append(
        Around(block.path, block.first, len(now.heard), block.kept, stream_kept(leaving) if same else None)
    )
    block.first, block.kept, block.given = len(now.heard), None, leaving
