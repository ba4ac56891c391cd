"""Where converted checkpoints are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache: SINKSCOPE_CACHE, else XDG_CACHE_HOME/sinkscope, else ~/.cache/sinkscope."""
    chosen = os.environ.get("SINKSCOPE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkscope"
