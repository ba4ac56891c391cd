"""Context managers of the training loop: one thread, and interrupts between two steps only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, which is faster for tensors this small; restores the user's number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back; the yielded function raises KeyboardInterrupt if Ctrl-C was pressed.

    An interrupt within a step would lose the batch that was drawn for it, and a resumed training would differ from an
    uninterrupted one. Only the main thread receives signals; in other threads nothing is held back.
    """
    pressed = threading.Event()

    def release() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield release
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, before)
