"""One measurement at a time in a process.

A measurement changes what all threads share: the model's hooks, its configuration during the self-check, and torch's
stance on compiled code. Two at once could measure each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock, Thread, current_thread

from sinkscope.errors import SinkscopeError


@dataclass(eq=False)
class _Turn:
    what: str
    thread: Thread
    listens: bool = False
    anywhere: bool = False


_turns: list[_Turn] = []
_lock = RLock()


@contextmanager
def alone(what: str, listens: bool = False, anywhere: bool = False) -> Iterator[None]:
    """Claims the process for this thread's measurement until the block ends. The same thread may claim it again.

    `listens`: it runs no model itself; see `measuring`. `anywhere`: it listens to all threads, beside others that do.

    Raises SinkscopeError, which names the other measurement, where another thread has claimed it. It does not wait: a
    scan can take hours.
    """
    turn = _Turn(what, current_thread(), listens, anywhere)
    with _lock:
        _turns[:] = [earlier for earlier in _turns if earlier.thread.is_alive()]
        first = _turns[0] if _turns else turn
        if first.thread is not turn.thread and not (first.anywhere and anywhere):
            raise SinkscopeError(
                f"{what} cannot start: {first.what} runs in this process, in the thread {first.thread.name!r}, and one "
                "model is measured at a time; wait until it has ended, or use another process"
            )
        _turns.append(turn)
    try:
        yield
    finally:
        with _lock:
            if turn in _turns:
                _turns.remove(turn)


def measuring() -> bool:
    """Whether a measurement runs in this process that drives a model itself, such as a scan inside a watched block."""
    with _lock:
        return any(not turn.listens for turn in _turns)
