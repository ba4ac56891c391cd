"""The one error a user is meant to read: a sentence saying what is wrong and what to do. The command line exits 2."""

from __future__ import annotations

import os
import traceback


class SinkscopeError(Exception):
    """Something the user can mend: a wrong name, a damaged file, data that do not fit. One line, no traceback."""


class OutOfMemory(SinkscopeError):
    """A device has no room for what it was asked to do; another process of the same launch may well have had it."""


def in_one_line(error: Exception) -> str:
    """What went wrong, for stderr."""
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
