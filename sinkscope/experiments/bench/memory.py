"""Peak memory of a piece of work, and what is free: of the GPU a model is on, or of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Most memory that `run` held above what was held before: allocated on a CUDA device, resident on a CPU.

    None where no peak can be had (other accelerators, systems without Linux's /proc).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not _reset():
        return None
    before = _resident("VmRSS")
    run()
    return max(0, _resident("VmHWM") - before)


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free for more work; None on accelerators that do not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def _reset() -> bool:
    """Makes the process's high-water mark start anew; False where the system has none or forbids it."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
