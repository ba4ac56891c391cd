"""Heads zeroed where the output projection reads them: the same ones in every sequence, or random ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import check_sites, no_head, projections, zeroed
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.head_choice import PLACE, HeadTable, Score, head_table, read_scored
from sinkscope.runs.saved.ablation import Heads


@dataclass(frozen=True)
class ZeroedHeads(Arm):
    """The heads of `chosen` set to 0. `table`: all heads of the model, for the control; None where there is none."""

    title: str
    chosen: Heads
    table: HeadTable | None = None

    @property
    def name(self) -> str:
        return self.title

    @property
    def count(self) -> int:
        """How many heads are set to 0."""
        return sum(map(len, self.chosen.values()))

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        forward.touches(self.count)
        return zeroed(forward.setting.base, forward.setting.sites, self.chosen)

    def changes(self, forward: Pass) -> Iterable[str] | None:
        return projections(forward.setting.sites, self.chosen)

    def heads(self, seed: int, draw: int) -> Heads:
        """The heads, the same in each draw."""
        return self.chosen

    def control(self) -> Arm | None:
        return None if self.table is None else RandomHeads(self.count, self.table)


@dataclass(frozen=True)
class RandomHeads(Arm):
    """`count` random heads set to 0, others in each draw; a larger count holds the smaller one's heads."""

    count: int
    table: HeadTable | None = None

    @property
    def random(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"heads:random{self.count}"

    def ready(self, setting: Setting) -> Arm:
        table = all_heads(setting)
        if self.count > len(table.rows):
            raise SinkscopeError(f"--arm {self.name}: the model has only {len(table.rows)} heads")
        return RandomHeads(self.count, table)

    def heads(self, seed: int, draw: int) -> Heads:
        """The heads of one draw, once the arm is ready."""
        assert self.table is not None
        return self.table.drawn(self.count, seed, draw)

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        forward.touches(self.count)
        return zeroed(forward.setting.base, forward.setting.sites, self.heads(forward.setting.seed, forward.draw))

    def changes(self, forward: Pass) -> Iterable[str] | None:
        return projections(forward.setting.sites, self.heads(forward.setting.seed, forward.draw))


class NamedHeads(Arm):
    """Heads that only the model or a run can tell: `ready` gives the arm that zeroes them."""

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        raise TypeError(f"{self.name} is not ready: apply what its `ready` returns")


@dataclass(frozen=True)
class ScoredHeads(NamedHeads):
    """The share of heads that a score of the run calls most dormant."""

    score: Score
    share: float

    @property
    def name(self) -> str:
        return f"heads:{self.score.name}{100 * self.share:g}%"

    @property
    def from_run(self) -> str:
        return "its heads are chosen by a score of a run"

    def ready(self, setting: Setting) -> Arm:
        check_sites(setting)
        assert setting.run is not None  # `check_run` saw to it
        try:
            table = head_table(setting.run, [self.score])
            return ZeroedHeads(self.name, table.dormant(self.score, table.count(self.share)), table)
        except SinkscopeError as error:
            raise SinkscopeError(f"--arm {self.name}: {error}") from None


@dataclass(frozen=True)
class ListedHeads(NamedHeads):
    """Heads given by layer and number, of the model's text."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return "heads:" + "+".join(f"{layer}.{head}" for layer, head in self.pairs)

    def ready(self, setting: Setting) -> Arm:
        check_sites(setting)
        table = all_heads(setting)
        chosen: Heads = {}
        for layer, head in self.pairs:
            sites = [site for site in setting.sites if site.layer == layer and head < site.heads]
            if len(sites) != 1:
                raise SinkscopeError(f"--arm {self.name}: {no_head(setting, layer, head)}")
            chosen.setdefault(sites[0].name, []).append(head)
        return ZeroedHeads(self.name, chosen, table)


def all_heads(setting: Setting) -> HeadTable:
    """All heads of the model, in the order of its layers."""
    check_sites(setting)
    rows = [
        (site.stream, site.layer, site.name, head) for site in setting.sites for head in range(site.heads)
    ]  # fmt: skip
    return HeadTable(pd.DataFrame(rows, columns=PLACE))


def read_heads(rest: str) -> Arm:
    """Reads what follows `heads:`."""
    if re.fullmatch(r"\d+\.\d+(\+\d+\.\d+)*", rest):
        pairs = [part.split(".") for part in rest.split("+")]
        listed = {(number(layer, "the layer", 0), number(head, "the head", 0)) for layer, head in pairs}
        return ListedHeads(tuple(sorted(listed)))
    if rest.startswith("random"):
        return RandomHeads(number(rest.removeprefix("random"), "the number of heads", 1))
    return ScoredHeads(*read_scored(rest))
