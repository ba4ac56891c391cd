"""Locks a file for one process; the system frees it when the file is closed or the process dies."""

from __future__ import annotations

import errno
import os
from importlib import import_module
from typing import Any


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")
"""What locks files: the first on POSIX, the second on Windows."""


def take(lock: int) -> None:
    """Locks an open file. Raises BlockingIOError where another process holds it, OSError where there are no locks."""
    if fcntl is not None:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        try:
            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)  # its first byte, which need not be there
        except PermissionError as error:
            raise BlockingIOError(errno.EAGAIN, error.strerror) from None
    else:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
