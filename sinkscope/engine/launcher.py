"""Reads what a launcher (accelerate launch, torchrun) sets in a process's environment; needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sinkscope.errors import SinkscopeError

UNSET = "start with torchrun or accelerate launch, or unset LOCAL_RANK and WORLD_SIZE"
"""What to do where the environment names a launch that does not exist."""


def size() -> int:
    """Number of processes in this launch; 1 without a launcher.

    Raises SinkscopeError where the environment holds what no launcher sets.
    """
    if "LOCAL_RANK" not in os.environ:
        return 1
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise SinkscopeError(f"WORLD_SIZE={text} is not a number of processes: {UNSET}")
    return int(text)


def hush() -> None:
    """Discards stdout and stderr of every process but the main one (SINKSCOPE_TRACEBACK=1 keeps stderr)."""
    if size() == 1 or os.environ.get("RANK", "0") == "0":
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stdout = nowhere
    if not os.environ.get("SINKSCOPE_TRACEBACK"):
        sys.stderr = nowhere
