"""The errors that a user reads: one sentence says what is wrong and what to do. The command line then exits with 2."""

from __future__ import annotations

import os
import traceback


class SinkscopeError(Exception):
    """A problem that the user can fix: a wrong name, a damaged file, unsuitable data. One line, no traceback."""


class OutOfMemory(SinkscopeError):
    """A device ran out of memory. Other processes of the same launch may have had enough."""


def in_one_line(error: Exception) -> str:
    """Returns the error as one line for stderr."""
    if isinstance(error, SinkscopeError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: try a smaller --seq-len or --batch-size"
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if os.environ.get("SINKSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    detail = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {detail} (SINKSCOPE_TRACEBACK=1 shows where)"
