"""Writes models and states of trainings, or says in one line why it cannot."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Raises SinkscopeError where the block cannot write to the folder. Transformers is quiet inside it.

    A full disk is an OSError to Python and a SafetensorError where safetensors meets it.
    """
    try:
        with quiet_transformers():
            yield
    except (OSError, SafetensorError) as error:
        raise SinkscopeError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None


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
