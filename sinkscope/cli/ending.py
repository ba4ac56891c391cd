"""Ends a command without freeing each of its objects.

Python frees all that is left when it ends. Once torch and transformers are imported these are a million objects, and
that takes longer than to scan a short text with a small model.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from typing import NoReturn

from sinkscope.cli.signals import end_at_the_next

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
