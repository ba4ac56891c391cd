"""Which positions of a sequence an arm means: firstN, middleN, recentN, randomN, sinks, sink-tokens, or as many random
ones; and what arms over positions share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import check_calls
from sinkscope.experiments.arms.grammar import number
from sinkscope.runs.selections import sink_ids

SINKS, SINK_TOKENS, RANDOM = "sinks", "sink-tokens", "random"


@dataclass(frozen=True)
class Positions:
    """A set of positions of each sequence.

    firstN: 0..N-1; recentN: the last N; middleN: N from (T-N)//2 on; randomN: N of 1..T-1, drawn for each sequence;
    sinks: the sinks of the unablated model (`Pass.sinks`); sink-tokens: where a token stands that tokens.csv of the run
    lists as an attention sink, at position 0 or elsewhere. random-sinks, random-sink-tokens: as many of 1..T-1, drawn.
    """

    place: str
    count: int | None = None

    @property
    def name(self) -> str:
        """The positions as the grammar writes them."""
        return self.place if self.count is None else f"{self.place}{self.count}"

    @property
    def random(self) -> bool:
        """Whether each draw means other positions."""
        return self.place.startswith(RANDOM)

    @property
    def plus(self) -> str:
        """`+NAME` behind what is done to all other positions; nothing where none is kept."""
        return "" if self.count == 0 else f"+{self.name}"

    @property
    def from_run(self) -> str:
        """What a run tells of these positions, as `Arm.from_run`."""
        return f"{self.name}: tokens.csv of a run names these tokens" if self.place.endswith(SINK_TOKENS) else ""

    def control(self) -> Positions | None:
        """As many random positions; None for positions that are random, or none at all."""
        if self.random or self.count == 0:
            return None
        return Positions(f"{RANDOM}-{self.place}") if self.count is None else Positions(RANDOM, self.count)

    def check(self, setting: Setting, arm: str) -> None:
        """Raises SinkscopeError, which names the arm, where a sequence has too few positions, or the sinks are not
        known."""
        about = f"--arm {arm}: {self.name}"
        if self.place.endswith(SINKS) and setting.no_sinks:
            raise SinkscopeError(f"{about}: {setting.no_sinks}")
        if self.place.endswith(SINK_TOKENS):
            assert setting.run is not None  # `check_run` saw to it
            sink_ids(setting.run)
        length = setting.ids.shape[1]
        most = length - 1 if self.random else length
        if (self.count or 0) > most:
            raise SinkscopeError(
                f"{about}: sequences of {length} tokens have only {most} such positions; a longer --seq-len has more"
            )

    def mask(self, forward: Pass) -> Tensor:
        """True at the positions, bool [sequence of the batch, T]."""
        if self.place == SINKS:
            assert forward.sinks is not None
            return forward.sinks.to(forward.ids.device)
        if self.place == SINK_TOKENS:
            return _sink_tokens(forward)
        batch, length = forward.ids.shape
        mask = torch.zeros(batch, length, dtype=torch.bool)
        if self.random:
            for row, count in enumerate(self._drawn(forward)):
                mask[row, 1 + forward.generator(row).permutation(length - 1)[:count]] = True
        else:
            count = self.count or 0
            start = {"first": 0, "middle": (length - count) // 2, "recent": length - count}[self.place]
            mask[:, start : start + count] = True
        return mask.to(forward.ids.device)

    def _drawn(self, forward: Pass) -> list[int]:
        """How many positions are drawn in each sequence of the batch: of T-1, where all T are sinks."""
        if self.count is not None:
            return [self.count] * len(forward.ids)
        chosen: list[int] = Positions(self.place.removeprefix(f"{RANDOM}-")).mask(forward).sum(1).tolist()
        return chosen


NO_POSITIONS = Positions("first", 0)


@dataclass(frozen=True)
class PositionArm(Arm):
    """An arm that changes attention calls at positions, or everywhere but there, beside as many random positions."""

    positions: Positions

    @property
    def random(self) -> bool:
        return self.positions.random

    @property
    def from_run(self) -> str:
        return self.positions.from_run

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.positions.check(setting, self.name)
        return self

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        mask = self.positions.mask(forward)
        forward.touches(mask.sum(-1))
        with self.in_force(forward, mask):
            yield

    @abstractmethod
    def in_force(self, forward: Pass, mask: Tensor) -> AbstractContextManager[Any]:
        """Puts the change in force until the block ends; `mask`: the positions, bool [sequence of the batch, T]."""

    def control(self) -> Arm | None:
        control = self.positions.control()
        return None if control is None else replace(self, positions=control)


def _sink_tokens(forward: Pass) -> Tensor:
    assert forward.setting.run is not None  # `check` saw to it
    at_start, elsewhere = (torch.tensor(ids, device=forward.ids.device) for ids in sink_ids(forward.setting.run))
    mask = torch.isin(forward.ids, elsewhere)
    mask[:, 0] = torch.isin(forward.ids[:, 0], at_start)
    return mask


def read_kept(text: str | None) -> Positions:
    """Reads what follows the `+` of an arm that leaves some positions alone; None where there is no `+`."""
    return NO_POSITIONS if text is None else read_positions(text)


def read_positions(text: str) -> Positions:
    """Reads positions. Raises SinkscopeError for any other text."""
    if text.removeprefix(f"{RANDOM}-") in (SINKS, SINK_TOKENS):
        return Positions(text)
    parts = re.fullmatch(r"(first|middle|recent|random)(\d*)", text)
    if parts is None:
        raise SinkscopeError(f"{text[:40]!r} names no positions")
    return Positions(parts[1], number(parts[2] or "1", "the number of positions", 1))
