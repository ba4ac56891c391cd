"""Puts off what is done beside a step of a generation until the step has ended.

Between two layers of a model, the weights of the last one have taken our code's place in the processor's caches, and
each of its lines takes several times as long as in one go at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sinkscope.capture.kept import as_of
from sinkscope.capture.private_doors import times_written


class Tape:
    """What happened in a step, in its order. Of each tensor it is noted how often it had been written into: one that is
    written into before the end counts as written, as it would without a tape."""

    def __init__(self, root: str) -> None:
        """`root`: the path of the module that the step is a call of."""
        self.root = root
        self._events: list[tuple[Callable[..., object], tuple[Any, ...], list[tuple[Tensor, int]]]] = []
        self._given: list[Any] = []

    def put(self, tensors: tuple[Any, ...], look: Callable[..., object], *given: Any) -> bool:
        """Lets `look(*given)` be called at the end, as if it were called now. `look` may keep no other tensors than
        these. Returns False, and does not, where one of them has to be copied or read now."""
        noted = []
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                written = times_written(tensor)
                if _is_part(tensor) if written else tensor.is_inference():
                    return False
                noted.append((tensor, written))
        self._events.append((look, given, noted))
        return True

    def enters(self, given: Any) -> None:
        """A module was given something that the next attention call in it keeps."""
        self._given.append(given)

    def attends(self, tensors: tuple[Any, ...], look: Callable[..., object], *given: Any) -> bool:
        """As `put`, for an attention call, which keeps what the modules around it were given."""
        around, self._given = self._given, []
        return self.put((*tensors, *around), look, *given)

    def play(self, fails: Callable[[Exception], None]) -> None:
        """Calls all of them; `fails` gets what one of them raises."""
        events = self._events[::-1]
        self._events.clear()
        while events:  # each is let go of as the records of it are made: many objects have Python look for cycles
            look, given, noted = events.pop()
            try:
                changed = [(tensor, written) for tensor, written in noted if times_written(tensor) != written]
                if changed:
                    with as_of(changed):
                        look(*given)
                else:
                    look(*given)
            except Exception as error:  # whatever it is, the pass is somebody else's and goes on
                fails(error)


def _is_part(tensor: Tensor) -> bool:
    """Whether a tensor shows a part of its memory; also where it has none of its own, as a sparse one."""
    try:
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except RuntimeError:  # NotImplementedError is one
        return True
