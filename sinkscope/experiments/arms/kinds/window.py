"""StreamingLLM's window: every query sees its last keys and a few first ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.narrowed import Narrowing
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.calls import check_calls
from sinkscope.experiments.arms.grammar import arm_kind, number
from sinkscope.experiments.arms.positions import Positions

FULL = "/full"


@dataclass(frozen=True)
class Window(Arm):
    """Query i sees keys i-size+1..i and those of `sinks`, of the keys that the model's own mask shows it.

    Keys keep their positions, as in a cache that evicts without renumbering. `full`: only in layers without a window or
    chunks of their own.
    """

    size: int
    sinks: Positions
    full: bool = False

    @property
    def family(self) -> str | None:
        return None if self.random else f"window:{self.size}{FULL * self.full}"

    @property
    def kept(self) -> int | None:
        return self.sinks.count

    @property
    def name(self) -> str:
        sinks = self.sinks.name if self.random else str(self.sinks.count)
        return f"window:{self.size}+{sinks}{FULL * self.full}"

    @property
    def random(self) -> bool:
        return self.sinks.random

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.sinks.check(setting)
        if self.full and not any(site.kind.name == "full" for site in setting.sites):
            raise SinkscopeError(f"--arm {self.name}: the model has no full layer; leave out {FULL}")
        return self

    @contextmanager
    def applied(self, one: Pass) -> Iterator[None]:
        chosen = self.sinks.mask(one)
        one.touches(chosen.sum(-1))
        chosen = (chosen if self.random else chosen[:1])[:, None, None, :]

        def allowed(rows: Tensor, columns: Tensor) -> Tensor:
            return (columns > rows - self.size) | chosen.to(rows.device)[..., columns[0]]

        narrow = Narrowing(allowed)

        def windowed(site: Site, call: AttentionCall) -> AttentionCall:
            return call if self.full and site.kind.name != "full" else narrow(call)

        with one.changed(windowed):
            yield

    def control(self) -> Arm | None:
        control = self.sinks.control()
        return None if control is None else Window(self.size, control, self.full)


@arm_kind("window", "window:W+S, window:W+randomS, either with /full", "Xiao et al. 2309.17453 (StreamingLLM)")
def read_window(rest: str) -> Arm:
    """Every query sees the last W keys and the first S (or S random ones): what a cache that evicts all others would
    see. With /full only in layers that have no window of their own."""
    found = re.fullmatch(r"(\d+)\+(random)?(\d+)(/full)?", rest)
    if found is None:
        raise SinkscopeError(f"{rest[:40]!r} is no window")
    size = number(found[1], "the window", 1)
    sinks = Positions(found[2] or "first", number(found[3], "the number of sinks", 1 if found[2] else 0))
    return Window(size, sinks, found[4] is not None)
