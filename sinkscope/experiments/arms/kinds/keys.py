"""Keys hidden from later queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from sinkscope.capture.narrowed import Narrowing
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.calls import check_calls
from sinkscope.experiments.arms.grammar import arm_kind
from sinkscope.experiments.arms.positions import GRAMMAR, Positions, read_positions


@dataclass(frozen=True)
class HiddenKeys(Arm):
    """No query i > k sees a key k of the positions, in any layer; query k keeps it."""

    positions: Positions

    @property
    def name(self) -> str:
        return f"keys:{self.positions.name}"

    @property
    def random(self) -> bool:
        return self.positions.random

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.positions.check(setting)
        return self

    @contextmanager
    def applied(self, one: Pass) -> Iterator[None]:
        hidden = self.positions.mask(one)
        one.touches(hidden.sum(-1))
        shared = hidden[:1] if bool((hidden == hidden[:1]).all()) else hidden
        seen = ~shared[:, None, None, :]

        def allowed(rows: Tensor, columns: Tensor) -> Tensor:
            return seen.to(rows.device)[..., columns[0]] | (columns >= rows)

        narrow = Narrowing(allowed)
        with one.changed(lambda site, call: narrow(call)):
            yield

    def control(self) -> Arm | None:
        control = self.positions.control()
        return None if control is None else HiddenKeys(control)


@arm_kind("keys", f"keys:POSITIONS with {GRAMMAR}", "ours")
def read_keys(rest: str) -> Arm:
    """Keys at some positions hidden from all later queries, in every layer. A key's own query still sees it."""
    return HiddenKeys(read_positions(rest))
