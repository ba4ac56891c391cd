"""Keys hidden from later queries."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sinkscope.capture.calls import Narrowing
from sinkscope.experiments.arms.arm import Arm, Pass
from sinkscope.experiments.arms.positions import PositionArm, read_positions


@dataclass(frozen=True)
class HiddenKeys(PositionArm):
    """No query i > k sees a key k of the positions, in any layer; query k keeps it."""

    @property
    def name(self) -> str:
        return f"keys:{self.positions.name}"

    def in_force(self, forward: Pass, mask: Tensor) -> AbstractContextManager[Any]:
        shared = mask[:1] if bool((mask == mask[:1]).all()) else mask
        seen = ~shared[:, None, None, :]

        def allowed(rows: Tensor, columns: Tensor) -> Tensor:
            return seen.to(rows.device)[..., columns[0]] | (columns >= rows)

        narrow = Narrowing(allowed)
        return forward.changed(lambda site, call: narrow(call))


def read_keys(rest: str) -> Arm:
    """Reads what follows `keys:`."""
    return HiddenKeys(read_positions(rest))
