"""Which positions of a sequence an arm means: firstN, middleN, recentN, randomN, sinks, sink-tokens, or as many random
ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.plan import INTERFACE
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.grammar import number
from sinkscope.runs.token_selection import sink_ids

GRAMMAR = "firstN, middleN, recentN, randomN, sinks or sink-tokens"
SINKS, SINK_TOKENS, RANDOM = "sinks", "sink-tokens", "random"


@dataclass(frozen=True)
class Positions:
    """A set of positions of each sequence.

    firstN: 0..N-1; recentN: the last N; middleN: N around T/2; randomN: N of 1..T-1, drawn for each sequence; sinks:
    the sinks of the unablated model (`Pass.sinks`); sink-tokens: where a token stands that tokens.csv of the run lists
    as an attention sink, at position 0 or elsewhere. random-sinks, random-sink-tokens: as many of 1..T-1, drawn.
    """

    place: str
    count: int | None = None

    @property
    def name(self) -> str:
        return self.place if self.count is None else f"{self.place}{self.count}"

    @property
    def random(self) -> bool:
        return self.place.startswith(RANDOM)

    @property
    def plus(self) -> str:
        """`+NAME` behind what is done to all other positions; nothing where none is kept."""
        return "" if self.count == 0 else f"+{self.name}"

    def control(self) -> Positions | None:
        """As many random positions; None for positions that are random, or none at all."""
        if self.random or self.count == 0:
            return None
        return Positions(f"{RANDOM}-{self.place}") if self.count is None else Positions(RANDOM, self.count)

    def check(self, setting: Setting) -> None:
        """Raises SinkscopeError where a sequence has too few positions, or the sinks are not known."""
        if self.place.endswith(SINKS) and any(site.path != INTERFACE for site in setting.sites):
            raise SinkscopeError(f"{self.name}: the model computes attention in its own way, so its sinks are not seen")
        if self.place.endswith(SINK_TOKENS):
            if setting.run is None:
                raise SinkscopeError(f"{self.name}: tokens.csv of a run names these tokens: give --run")
            sink_ids(setting.run)
        length = setting.ids.shape[1]
        most = length - 1 if self.random else length
        if (self.count or 0) > most:
            raise SinkscopeError(f"{self.name}: sequences of {length} tokens have only {most} such positions")

    def mask(self, one: Pass) -> Tensor:
        """True at the positions, bool [sequence of the batch, T]."""
        if self.place == SINKS:
            assert one.sinks is not None
            return one.sinks.to(one.ids.device)
        if self.place == SINK_TOKENS:
            return _sink_tokens(one)
        batch, length = one.ids.shape
        mask = torch.zeros(batch, length, dtype=torch.bool)
        if self.random:
            for row, count in enumerate(self._drawn(one)):
                mask[row, 1 + one.generator(row).permutation(length - 1)[:count]] = True
        else:
            count = self.count or 0
            start = {"first": 0, "middle": (length - count) // 2, "recent": length - count}[self.place]
            mask[:, start : start + count] = True
        return mask.to(one.ids.device)

    def _drawn(self, one: Pass) -> list[int]:
        """How many positions are drawn in each sequence of the batch: of T-1, where all T are sinks."""
        if self.count is not None:
            return [self.count] * len(one.ids)
        chosen: list[int] = Positions(self.place.removeprefix(f"{RANDOM}-")).mask(one).sum(1).tolist()
        return chosen


NO_POSITIONS = Positions("first", 0)


def _sink_tokens(one: Pass) -> Tensor:
    assert one.setting.run is not None  # `check` saw to it
    at_start, elsewhere = (torch.tensor(ids, device=one.ids.device) for ids in sink_ids(one.setting.run))
    mask = torch.isin(one.ids, elsewhere)
    mask[:, 0] = torch.isin(one.ids[:, 0], at_start)
    return mask


def read_kept(text: str | None) -> Positions:
    """Reads what follows the `+` of an arm that leaves some positions alone; None where there is no `+`."""
    return NO_POSITIONS if text is None else read_positions(text)


def read_positions(text: str) -> Positions:
    """Reads positions. Raises SinkscopeError for any other text."""
    if text.removeprefix(f"{RANDOM}-") in (SINKS, SINK_TOKENS):
        return Positions(text)
    found = re.fullmatch(r"(first|middle|recent|random)(\d*)", text)
    if found is None:
        raise SinkscopeError(f"{text[:40]!r} names no positions")
    return Positions(found[1], number(found[2] or "1", "the number of positions", 1))
