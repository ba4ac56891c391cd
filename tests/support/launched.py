"""The command as a launcher starts it, with a planted fault. Usage: launched.py FAULT scan|arms|... MODEL ...

`error`: the last process fails in its second batch. `memory`: the last process runs out of memory in every batch of
more than one sequence. `slow`: every batch of every process takes half a second longer. `none`: no fault. Arms are
measured in batches of one sequence, so that there is more than one batch.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from sinkscope.cli import main
from sinkscope.engine.loop import Loop
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms import engine
from sinkscope.experiments.arms.engine import Piece

FAULT = sys.argv.pop(1)
LAST = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
one_batch, piece = Loop._one_batch, engine.Engine._piece
batches = []


def meet(batch: Any) -> None:
    """Meets the fault, once for each batch of this process."""
    batches.append(batch)
    if FAULT == "slow":
        time.sleep(0.5)
    if LAST and FAULT == "error" and len(batches) == 2:
        raise SinkscopeError("a layer overflowed")


def faulty(self: Loop, domain: int, batch: Any) -> Any:
    meet(batch)
    if LAST and FAULT == "memory" and len(batch) > 1:
        raise MemoryError
    return one_batch(self, domain, batch)


def faulty_piece(self: engine.Engine, own: Piece) -> Any:
    meet(own)
    return piece(self, own)


Loop._one_batch = faulty  # type: ignore[method-assign]
engine.Engine._piece = faulty_piece  # type: ignore[method-assign]
engine.batch_size = lambda *_: 1  # type: ignore[assignment]
main()
