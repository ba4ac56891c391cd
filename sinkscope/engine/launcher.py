"""Reads what a launcher (accelerate launch, torchrun) sets in a process's environment; needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def size() -> int:
    """Number of processes in this launch; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def hush() -> None:
    """Discards stdout and stderr of every process but the main one (SINKSCOPE_TRACEBACK=1 keeps stderr)."""
    if size() == 1 or os.environ.get("RANK", "0") == "0":
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stdout = nowhere
    if not os.environ.get("SINKSCOPE_TRACEBACK"):
        sys.stderr = nowhere
