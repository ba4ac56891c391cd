"""Reads what a launcher (accelerate launch, torchrun) sets in a process's environment; needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sinkscope.errors import SinkscopeError

UNSET = "start with torchrun or accelerate launch, or unset LOCAL_RANK and WORLD_SIZE"
"""What to do where the environment names a launch that does not exist."""


VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def told_by() -> str:
    """The variables of the environment that tell of a launch, as `NAME=value, ...`."""
    return ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)


def is_main() -> bool:
    """Whether this is the main process, which alone prints; without a launcher it is."""
    return os.environ.get("RANK", "0") == "0"


def hush() -> None:
    """Discards stdout and stderr of every process but the main one (SINKSCOPE_TRACEBACK=1 keeps stderr)."""
    if size() == 1 or is_main():
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stdout = nowhere
    if not os.environ.get("SINKSCOPE_TRACEBACK"):
        sys.stderr = nowhere
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own lines do not go through sys.stderr
