"""Values set to 0: what a query gets from a key that it attends to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.experiments.arms.arm import Arm, Pass
from sinkscope.experiments.arms.positions import PositionArm, read_positions


@dataclass(frozen=True)
class ZeroedValues(PositionArm):
    """v_k := 0 at the positions, in all heads; the attention on them stays."""

    @property
    def name(self) -> str:
        return f"value:{self.positions.name}"

    def in_force(self, forward: Pass, mask: Tensor) -> AbstractContextManager[Any]:
        def without(site: Site, call: AttentionCall) -> AttentionCall:
            return replace(call, value=call.value.masked_fill(mask[:, None, :, None].to(call.value.device), 0.0))

        return forward.changed(without)


def read_value(rest: str) -> Arm:
    """Reads what follows `value:`."""
    return ZeroedValues(read_positions(rest))
