"""Peak memory of a function call, on the GPU that a model is on or on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of `run` in bytes, above what was held before: allocated on a CUDA device, resident on a CPU.

    None where no peak can be measured: other accelerators, systems without Linux's /proc.
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


def _reset() -> bool:
    """Resets the process's peak resident memory; False where the system has no such counter or forbids it."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
