"""A lock that threads get in turn."""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident

FREE, HANDED_ON = 0, -1


class Turns:
    """A lock as threading.RLock, which threads get in the order in which they ask.

    The plain one goes to whoever asks first once it is free, which is nearly always the thread that has just given it
    back: the end of a watch could wait for as long as a service computes.
    """

    def __init__(self) -> None:
        self._mutex, self._waiting = Lock(), deque[Lock]()
        self._holder, self._times = FREE, 0

    def acquire(self) -> None:
        """Waits until no other thread holds the lock, and none that came before wants it."""
        if self._holder == get_ident():
            self._times += 1
            return
        with self._mutex:
            if self._holder == FREE:
                self._holder, self._times = get_ident(), 1
                return
            place = Lock()
            place.acquire()
            self._waiting.append(place)
        try:
            place.acquire()
            self._holder, self._times = get_ident(), 1
        except BaseException:  # Ctrl-C
            with self._mutex:
                if place in self._waiting:
                    self._waiting.remove(place)
                else:
                    self._hand_on()
            raise

    def release(self) -> None:
        """Gives the lock to the thread that waits longest, where this one has given it back as often as it took it."""
        self._times -= 1
        if not self._times:
            with self._mutex:
                self._hand_on()

    def _hand_on(self) -> None:
        self._holder = HANDED_ON if self._waiting else FREE
        if self._waiting:
            self._waiting.popleft().release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
