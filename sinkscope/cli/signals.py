"""How a command ends: on SIGTERM as on Ctrl-C, and without freeing each of its objects.

What was measured is kept, and a line says how to go on. The scheduler of a cluster, such as Slurm's, sends SIGTERM some
seconds before it kills a job.

Python frees all that is left when it ends. Once torch and transformers are imported these are a million objects, and
that takes longer than to scan a short text with a small model.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
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


OPEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""The files of Python that hold back what is written to them."""

_code: int | None = None


def end_at_once() -> None:
    """Lets the process end as soon as all that wants to be called at its end has been called.

    For a program's first line: whoever registered earlier, as a measurement of coverage that is started with Python,
    would not be called any more. Where there is one, and in a Python that does not tell, the process ends as any other.
    """
    registered = getattr(atexit, "_ncallbacks", None)
    if registered is not None and registered() == 0:
        atexit.register(_end)  # called last, because it is the first


def leave_to_python() -> None:
    """Lets Python end the process, for a program in it that may count on that."""
    atexit.unregister(_end)


def end(code: int) -> NoReturn:
    """Ends the command with an exit code."""
    global _code  # noqa: PLW0603 - a process ends once
    end_at_the_next(code)
    _code = code
    sys.exit(code)


def _end() -> None:
    """Ends the process here, if a command has ended it and much would have to be freed."""
    if _code is None or "torch" not in sys.modules:
        return
    try:
        for found in gc.get_objects():
            if issubclass(type(found), OPEN) and not found.closed:
                found.flush()
    except (OSError, ValueError):  # Python says what it could not write
        return
    os._exit(_code)
