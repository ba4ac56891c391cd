"""How many random cases the long tests draw: SINKSCOPE_RANDOM_SHARE=0.1 takes a tenth of them, never fewer than one."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("SINKSCOPE_RANDOM_SHARE", "1"))


def share_of(count: int) -> int:
    return max(1, round(count * SHARE))
