"""What a launcher (accelerate launch, torchrun) tells a process by its environment: known without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def size() -> int:
    """How many processes the launch has that this one is of; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def hush() -> None:
    """Only the main process speaks: the others' stdout and stderr go nowhere (SINKSCOPE_TRACEBACK=1 keeps stderr)."""
    if size() == 1 or os.environ.get("RANK", "0") == "0":
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stdout = nowhere
    if not os.environ.get("SINKSCOPE_TRACEBACK"):
        sys.stderr = nowhere
