"""Which positions of a sequence an arm means: firstN, middleN, recentN, randomN, sinks, random-sinks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.plan import INTERFACE
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.grammar import number

GRAMMAR = "firstN, middleN, recentN, randomN or sinks"


@dataclass(frozen=True)
class Positions:
    """A set of positions of each sequence.

    firstN: 0..N-1; recentN: the last N; middleN: N around T/2; randomN: N of 1..T-1, drawn for each sequence; sinks:
    the sinks of the unablated model (`Pass.sinks`); random-sinks: as many of 1..T-1, drawn.
    """

    place: str
    count: int | None = None

    @property
    def name(self) -> str:
        return self.place if self.count is None else f"{self.place}{self.count}"

    @property
    def random(self) -> bool:
        return self.place.startswith("random")

    def control(self) -> Positions | None:
        """As many random positions; None for positions that are random, or none at all."""
        if self.random or self.count == 0:
            return None
        return Positions("random-sinks") if self.count is None else Positions("random", self.count)

    def check(self, setting: Setting) -> None:
        """Raises SinkscopeError where a sequence has too few positions, or the sinks are not known."""
        if self.count is None and any(site.path != INTERFACE for site in setting.sites):
            raise SinkscopeError(f"{self.name}: the model computes attention in its own way, so its sinks are not seen")
        length = setting.ids.shape[1]
        most = length - 1 if self.random else length
        if (self.count or 0) > most:
            raise SinkscopeError(f"{self.name}: sequences of {length} tokens have only {most} such positions")

    def mask(self, one: Pass) -> Tensor:
        """True at the positions, bool [sequence of the batch, T]."""
        batch, length = one.ids.shape
        mask = torch.zeros(batch, length, dtype=torch.bool)
        if self.place == "sinks":
            assert one.sinks is not None
            mask |= one.sinks.cpu()
        elif self.random:
            for row in range(batch):
                mask[row, 1 + one.generator(row).permutation(length - 1)[: self._drawn(one, row)]] = True
        else:
            count = self.count or 0
            start = {"first": 0, "middle": (length - count) // 2, "recent": length - count}[self.place]
            mask[:, start : start + count] = True
        return mask.to(one.ids.device)

    def _drawn(self, one: Pass, row: int) -> int:
        if self.count is not None:
            return self.count
        assert one.sinks is not None
        return int(one.sinks[row].sum())


def read_positions(text: str) -> Positions:
    """Reads positions. Raises SinkscopeError for any other text."""
    if text in ("sinks", "random-sinks"):
        return Positions(text)
    found = re.fullmatch(r"(first|middle|recent|random)(\d*)", text)
    if found is None:
        raise SinkscopeError(f"{text[:40]!r} names no positions")
    return Positions(found[1], number(found[2] or "1", "the number of positions", 1))
