"""Which heads of a KV cache evict: all keys and values of a layer's head are kept, or those that a window shows.

A cache belongs to a KV head, so a plan chooses KV heads; the query heads of a group share what is kept.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.head_choice import Score, head_table, read_scored

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

    def ready(self, setting: Setting, sites: list[Site]) -> CachePlan:
        if setting.run is None:
            raise SinkscopeError(f"{self.name}: a score of a run chooses these heads: give --run")
        rows = head_table(setting.run, [self.score]).rows
        scores = rows.set_index(["module", "head"])[self.score.column]
        dormancy = pd.Series({head: self._of_group(scores, head, sites) for head in kv_heads(sites)}, dtype=float)
        count = int(self.share * len(dormancy) + 0.5)
        if not count:
            raise SinkscopeError(f"{self.name} of {len(dormancy)} KV heads is no head: give a larger share")
        known = dormancy.notna().sum()
        if count > known:
            raise SinkscopeError(
                f"{self.name}: only {known} of {len(dormancy)} KV heads have a value of {self.score.column}"
            )
        order = dormancy.dropna().sort_values(ascending=self.score.low, kind="stable")
        return replace(self, heads=tuple(order.index[:count]))

    def _of_group(self, scores: pd.Series, head: KVHead, sites: list[Site]) -> float:
        site = next(site for site in sites if site.name == head[0])
        own = scores.loc[[(site.name, query) for query in range(site.heads) if group_of(site, query) == head[1]]]
        return float(own.max(skipna=False) if self.score.low else own.min(skipna=False))

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
    own = {group for name, group in chosen if name == site.name}
    return tuple(group_of(site, head) in own for head in range(site.heads))


def read_plan(text: str) -> CachePlan:
    """Reads SCORE:50%, SCORE:low50% or randomN. Raises SinkscopeError for any other text."""
    drawn = re.fullmatch(r"random(\d+)", text)
    if drawn is not None:
        return RandomPlan(number(drawn[1], "the number of KV heads", 1))
    return ScoredPlan(*read_scored(text))
