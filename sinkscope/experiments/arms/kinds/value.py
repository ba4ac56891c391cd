"""Values set to 0: what a query gets from a key that it attends to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.calls import check_calls
from sinkscope.experiments.arms.grammar import arm_kind
from sinkscope.experiments.arms.positions import GRAMMAR, Positions, read_positions


@dataclass(frozen=True)
class ZeroedValues(Arm):
    """v_k := 0 at the positions, in all heads; the attention on them stays."""

    positions: Positions

    @property
    def name(self) -> str:
        return f"value:{self.positions.name}"

    @property
    def random(self) -> bool:
        return self.positions.random

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.positions.check(setting)
        return self

    @contextmanager
    def applied(self, one: Pass) -> Iterator[None]:
        mask = self.positions.mask(one)
        one.touches(mask.sum(-1))

        def without(site: Site, call: AttentionCall) -> AttentionCall:
            return replace(call, value=call.value.masked_fill(mask[:, None, :, None].to(call.value.device), 0.0))

        with one.changed(without):
            yield

    def control(self) -> Arm | None:
        control = self.positions.control()
        return None if control is None else ZeroedValues(control)


@arm_kind("value", f"value:POSITIONS with {GRAMMAR}", "Gu et al. 2410.10781")
def read_value(rest: str) -> Arm:
    """Values at some positions set to 0 in all heads. Queries go on attending there, and get nothing."""
    return ZeroedValues(read_positions(rest))
