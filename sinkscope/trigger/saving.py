"""Writes models and states of trainings, or says in one line why it cannot."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from sinkscope.checkpoints.private_doors import why_not_written
from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError
from sinkscope.runs.whole import remove


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Raises SinkscopeError where the block cannot write to the folder, and removes what it wrote there. Transformers
    is quiet inside it.

    A full disk is an OSError to Python and a SafetensorError where safetensors meets it.
    """
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        with quiet_transformers():
            yield
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            for path in set(folder.iterdir()) - before:
                remove(path)
        raise SinkscopeError(f"cannot write {folder}: {why_not_written(error)}") from None


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Makes the folder for the block. What is empty of it at the end of the block is removed.

    Raises SinkscopeError where the folder cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


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
