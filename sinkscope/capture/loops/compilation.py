"""Whether loops are being compiled, as they are once after an installation, and who is to be told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[bool], None]
"""Called with True where a thread waits for loops to be compiled, and with False once it has them."""


class Compilation:
    """The compilations of this process, and what each thread that waits for one calls.

    A thread tells of its own compilations, and of those of another thread that it waits for. No thread calls what
    another one has given.
    """

    def __init__(self) -> None:
        self._running = False
        self._tell: dict[int, Tell] = {}

    @contextmanager
    def told(self, tell: Tell) -> Iterator[None]:
        """Calls `tell` in the block, where this thread waits for a compilation."""
        thread = threading.get_ident()
        self._tell[thread] = tell
        try:
            yield
        finally:
            del self._tell[thread]

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A block that needs loops, and waits until they are there."""
        if self._running:
            self._say(True)
        try:
            yield
        finally:
            self._say(False)

    def began(self) -> None:
        """This thread compiles a loop."""
        self._running = True
        self._say(True)

    def ended(self) -> None:
        """This thread has compiled a loop."""
        self._running = False

    def _say(self, waits: bool) -> None:
        tell = self._tell.get(threading.get_ident())
        if tell is not None:
            tell(waits)


COMPILATION = Compilation()
