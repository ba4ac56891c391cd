"""SIGTERM ends a command as Ctrl-C does: what was measured is kept, and a line says how to go on.

The scheduler of a cluster, such as Slurm's, sends it some seconds before it kills a job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM: 128 and the number of the signal."""

_process: int | None = None
_terminated = False


def listen() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, unless whoever started it lets it ignore the signal."""
    global _process  # noqa: PLW0603 - a process has one handler of a signal
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _process = os.getpid()
        signal.signal(signal.SIGTERM, _interrupt)


def exit_code() -> int:
    """The exit code of an interrupted command."""
    return TERMINATED if _terminated else INTERRUPTED


@contextmanager
def left_to_program() -> Iterator[None]:
    """Leaves SIGTERM to a program that runs in this process, until the block ends."""
    listened = signal.getsignal(signal.SIGTERM) is _interrupt
    if listened:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if listened and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _interrupt)


def end_at_the_next(code: int) -> None:
    """Makes both signals end the process at once from now on, with this exit code: the command has ended, and Python,
    which still ends, would print a traceback. Does nothing where `listen` did nothing."""
    if _process != os.getpid():
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Does what Ctrl-C does just now: a training holds it back until the end of its step, a launch until all know."""
    global _terminated  # noqa: PLW0603 - as above
    if os.getpid() != _process:  # a copy of the process, which a library made for its own work
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _terminated = True
    at_interrupt = signal.getsignal(signal.SIGINT)
    if not callable(at_interrupt):  # a shell lets what it starts in the background ignore Ctrl-C
        raise KeyboardInterrupt
    at_interrupt(signal.SIGINT, frame)
