"""The command as a launcher starts it, with a planted fault. Usage: launched.py FAULT scan MODEL ...

`error`: the last process fails in its second batch. `memory`: the last process runs out of memory in every batch of
more than one sequence. `slow`: every batch of every process takes half a second longer.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from sinkscope.cli import main
from sinkscope.engine.loop import Loop
from sinkscope.errors import SinkscopeError

FAULT = sys.argv.pop(1)
LAST = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
one_batch = Loop._one_batch
batches = []


def faulty(self: Loop, domain: int, batch: Any) -> Any:
    batches.append(batch)
    if FAULT == "slow":
        time.sleep(0.5)
    if LAST and FAULT == "error" and len(batches) == 2:
        raise SinkscopeError("a layer overflowed")
    if LAST and FAULT == "memory" and len(batch) > 1:
        raise MemoryError
    return one_batch(self, domain, batch)


Loop._one_batch = faulty  # type: ignore[method-assign]
main()
