"""What a training loop asks of its surroundings: one thread, and interrupts only between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small lose by being shared among threads; the user's number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back; the function yielded raises KeyboardInterrupt where one came.

    An interrupt in the middle of a step would leave a batch drawn whose step was never made, and a resumed training
    would no longer be the uninterrupted one. Only the main thread gets signals; elsewhere nothing is held.
    """
    came = threading.Event()

    def release() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield release
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, before)
