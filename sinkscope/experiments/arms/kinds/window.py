"""StreamingLLM's window: every query sees its last keys and a few first ones, in all heads or in those of a plan.

A cache belongs to a KV head, so a plan chooses KV heads; the query heads of a group share what is kept."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.calls import Allowed, AttentionCall, Narrowing
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import check_calls
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.head_choice import Score, head_table, read_scored
from sinkscope.experiments.arms.positions import Positions
from sinkscope.runs.dormancy import share_of

KVHead = tuple[str, int]
"""The name of an attention site, and the number of a KV head."""


class CachePlan(ABC):
    """A choice of KV heads. `heads`: those it chooses, or draws from, once it is ready."""

    heads: tuple[KVHead, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """The plan as the grammar writes it."""

    @property
    @abstractmethod
    def random(self) -> bool:
        """Whether each draw chooses other heads."""

    @property
    def from_run(self) -> str:
        """What a run tells the plan, as `Arm.from_run`."""
        return ""

    @abstractmethod
    def ready(self, setting: Setting, sites: list[Site]) -> CachePlan:
        """The plan over the KV heads of these sites. Raises SinkscopeError where it cannot be made."""

    @abstractmethod
    def chosen(self, forward: Pass) -> Iterable[KVHead]:
        """The KV heads that evict in this pass."""


@dataclass(frozen=True)
class ScoredPlan(CachePlan):
    """The share of KV heads that a score of the run calls most dormant; `heads`, once the plan is ready.

    A KV head's score is that of its least dormant query head.
    """

    score: Score
    share: float
    heads: tuple[KVHead, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.score.name}{100 * self.share:g}%"

    @property
    def random(self) -> bool:
        return False

    @property
    def from_run(self) -> str:
        return f"{self.name}: a score of a run chooses these heads"

    def ready(self, setting: Setting, sites: list[Site]) -> CachePlan:
        assert setting.run is not None  # `check_run` saw to it
        rows = head_table(setting.run, [self.score]).rows
        scores = rows.set_index(["module", "head"])[self.score.column]
        dormancy = pd.Series({head: self._of_group(scores, head, sites) for head in kv_heads(sites)}, dtype=float)
        count = share_of(self.share, len(dormancy))
        if not count:
            raise SinkscopeError(f"{self.name} of {len(dormancy)} KV heads is no head: give a larger share")
        scored = dormancy.notna().sum()
        if count > scored:
            raise SinkscopeError(
                f"{self.name}: only {scored} of {len(dormancy)} KV heads have a value of {self.score.column}"
            )
        order = dormancy.dropna().sort_values(ascending=self.score.low, kind="stable")
        return replace(self, heads=tuple(order.index[:count]))

    def _of_group(self, scores: pd.Series, head: KVHead, sites: list[Site]) -> float:
        site = next(site for site in sites if site.name == head[0])
        values = scores.loc[[(site.name, query) for query in range(site.heads) if group_of(site, query) == head[1]]]
        return float(values.max(skipna=False) if self.score.low else values.min(skipna=False))

    def chosen(self, forward: Pass) -> Iterable[KVHead]:
        return self.heads


@dataclass(frozen=True)
class RandomPlan(CachePlan):
    """`count` of `heads`, others in each draw."""

    count: int
    heads: tuple[KVHead, ...] = ()

    @property
    def name(self) -> str:
        return f"random{self.count}"

    @property
    def random(self) -> bool:
        return True

    def ready(self, setting: Setting, sites: list[Site]) -> CachePlan:
        heads = tuple(kv_heads(sites))
        if self.count > len(heads):
            raise SinkscopeError(f"{self.name}: there are only {len(heads)} KV heads to choose from")
        return replace(self, heads=heads)

    def chosen(self, forward: Pass) -> Iterable[KVHead]:
        order = forward.common_generator().permutation(len(self.heads))
        return [self.heads[place] for place in np.sort(order[: self.count])]


def kv_heads(sites: list[Site]) -> list[KVHead]:
    """All KV heads of some attention sites, in order."""
    return [(site.name, group) for site in sites for group in range(site.kv_groups)]


def group_of(site: Site, head: int) -> int:
    """The KV head of a query head."""
    return head // (site.heads // site.kv_groups)


def query_heads(site: Site, chosen: Iterable[KVHead]) -> tuple[bool, ...]:
    """Whether each query head of a site belongs to one of the chosen KV heads."""
    groups = {group for name, group in chosen if name == site.name}
    return tuple(group_of(site, head) in groups for head in range(site.heads))


def read_plan(text: str) -> CachePlan:
    """Reads SCORE:50%, SCORE:low50% or randomN. Raises SinkscopeError for any other text."""
    drawn = re.fullmatch(r"random(\d+)", text)
    if drawn is not None:
        return RandomPlan(number(drawn[1], "the number of KV heads", 1))
    return ScoredPlan(*read_scored(text))


# StreamingLLM's window: every query sees its last keys and a few first ones, in all heads or in those of a plan.


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

    @property
    def from_run(self) -> str:
        return self.sinks.from_run or ("" if self.plan is None else self.plan.from_run)

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.sinks.check(setting, self.name)
        sites = [site for site in setting.sites if self._concerns(site)]
        if not sites:
            raise SinkscopeError(
                f"--arm {self.name}: the model has no full layer; leave out {FULL} (evict: --layers all)"
            )
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
            evicting = heads.get(site.name, (True,))
            if not self._concerns(site) or not any(evicting):
                return call
            if all(evicting):
                return whole(call)
            return some.setdefault(evicting, Narrowing(_in_heads(allowed, evicting)))(call)

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
