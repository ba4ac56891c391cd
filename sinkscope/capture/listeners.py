"""The ears of several threads on one thing of another library, which is changed while anyone listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Generic, TypeVar

Ear = TypeVar("Ear", bound=Callable[..., object])


class Listeners(Generic[Ear]):
    """Who listens, each in a thread of its own.

    `put` changes the thing when the first one comes, and returns what puts it back when the last one leaves.
    """

    def __init__(self, put: Callable[[], Callable[[], None]]) -> None:
        self._put, self._lock = put, Lock()
        self._back: list[Callable[[], None]] = []
        self._ears: list[tuple[int, Ear]] = []

    @contextmanager
    def joined_by(self, ear: Ear) -> Iterator[None]:
        """Lets `ear` listen in this thread until the block ends. Such blocks may end in any order."""
        mine = (get_ident(), ear)
        with self._lock:
            if not self._ears:
                self._back.append(self._put())
            self._ears.append(mine)
        try:
            yield
        finally:
            with self._lock:
                self._ears.remove(mine)
                if not self._ears:
                    self._back.pop()()

    def here(self) -> list[Ear]:
        """The ears of this thread, the first one first."""
        thread = get_ident()
        return [ear for of, ear in [*self._ears] if of == thread]

    def everywhere(self) -> list[Ear]:
        """The ears of all threads, the first one first."""
        return [ear for _, ear in [*self._ears]]
