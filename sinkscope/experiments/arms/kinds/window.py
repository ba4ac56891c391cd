"""StreamingLLM's window: every query sees its last keys and a few first ones, in all heads or in those of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.narrowed import Allowed, Narrowing
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.cache_plan import CachePlan, RandomPlan, query_heads, read_plan
from sinkscope.experiments.arms.calls import check_calls
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.positions import Positions

FULL = "/full"


@dataclass(frozen=True)
class Window(Arm):
    """Query i sees keys i-size+1..i and those of `sinks`, of the keys that the model's own mask shows it.

    Keys keep their positions, as in a cache that evicts without renumbering. `full`: only in layers without a window or
    chunks of their own. `plan`: only in these KV heads; None for all.
    """

    size: int
    sinks: Positions
    full: bool = False
    plan: CachePlan | None = None

    @property
    def family(self) -> str | None:
        return None if self.random else f"window:{self.size}{self._where}"

    @property
    def kept(self) -> int | None:
        return self.sinks.count

    @property
    def name(self) -> str:
        sinks = self.sinks.name if self.sinks.random else str(self.sinks.count)
        return f"window:{self.size}+{sinks}{self._where}"

    @property
    def _where(self) -> str:
        return FULL * self.full + ("" if self.plan is None else f"/{self.plan.name}")

    @property
    def random(self) -> bool:
        return self.sinks.random or (self.plan is not None and self.plan.random)

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.sinks.check(setting)
        sites = [site for site in setting.sites if self._concerns(site)]
        if not sites:
            raise SinkscopeError(f"--arm {self.name}: the model has no full layer; leave out {FULL}")
        if self.plan is None:
            return self
        try:
            return replace(self, plan=self.plan.ready(setting, sites))
        except SinkscopeError as error:
            raise SinkscopeError(f"--arm {self.name}: {error}") from None

    def _concerns(self, site: Site) -> bool:
        return not self.full or site.kind.name == "full"

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        kept = self.sinks.mask(forward)
        forward.touches(kept.sum(-1))
        kept = (kept if self.sinks.random else kept[:1])[:, None, None, :]
        heads = self._heads(forward)

        def allowed(rows: Tensor, columns: Tensor) -> Tensor:
            return (columns > rows - self.size) | kept.to(rows.device)[..., columns[0]]

        whole = Narrowing(allowed)
        some: dict[tuple[bool, ...], Narrowing] = {}  # layers in which the same heads evict share a mask

        def windowed(site: Site, call: AttentionCall) -> AttentionCall:
            own = heads.get(site.name, (True,))
            if not self._concerns(site) or not any(own):
                return call
            if all(own):
                return whole(call)
            return some.setdefault(own, Narrowing(_in_heads(allowed, own)))(call)

        with forward.changed(windowed):
            yield

    def changes(self, forward: Pass) -> Iterable[str] | None:
        heads = self._heads(forward)
        sites = [site for site in forward.setting.sites if self._concerns(site)]
        return [site.module for site in sites if any(heads.get(site.name, (True,)))]

    def _heads(self, forward: Pass) -> dict[str, tuple[bool, ...]]:
        """Whether each query head sees the window, by site; empty where all do."""
        if self.plan is None:
            return {}
        chosen = list(self.plan.chosen(forward))
        return {site.name: query_heads(site, chosen) for site in forward.setting.sites}

    def control(self) -> Arm | None:
        if self.random:
            return None
        if self.plan is not None:
            return replace(self, plan=RandomPlan(len(self.plan.heads)))
        control = self.sinks.control()
        return None if control is None else replace(self, sinks=control)


def _in_heads(allowed: Allowed, heads: tuple[bool, ...]) -> Allowed:
    """Hides keys as `allowed` does, from the heads that are True alone."""
    others = ~torch.tensor(heads)[:, None, None]
    return lambda rows, columns: allowed(rows, columns) | others.to(rows.device)


def read_window(rest: str) -> Arm:
    """Reads what follows `window:`."""
    parts = re.fullmatch(r"(\d+)\+(random)?(\d+)(/full)?(?:/(.+))?", rest)
    if parts is None:
        raise SinkscopeError(f"{rest[:40]!r} is no window")
    size = number(parts[1], "the window", 1)
    sinks = Positions(parts[2] or "first", number(parts[3], "the number of sinks", 1 if parts[2] else 0))
    return Window(size, sinks, parts[4] is not None, read_plan(parts[5]) if parts[5] else None)
