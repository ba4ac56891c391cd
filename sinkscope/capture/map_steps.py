"""The maps of one attention call that a model forms in its own code, over all passes of a batch of sequences.

No map is kept. What is taken of each pass's queries is put together at the end.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from sinkscope.capture.heard import Heard, Onward
from sinkscope.capture.kernels.map_walk import KEYS, MapRows, following
from sinkscope.capture.padded import BEHIND
from sinkscope.capture.still_cached import SlotSums
from sinkscope.capture.views import Cut
from sinkscope.errors import SinkscopeError

Thing = TypeVar("Thing")

TOGETHER = 32
"""Passes whose rows are put together at once: each pass has a number for every key before it, which would be T x T."""


class MapSteps:
    """The rows of one call so far, from its first pass. `cross`: its keys are no cache's, such as another text's.
    `sums`: what its cache's slots hold."""

    def __init__(self, heard: Heard, cross: bool) -> None:
        assert heard.parts is not None
        self.name = heard.shown
        self.cross = cross
        self._cuts = [cut for _, cut, _ in heard.parts if cut is not None]
        self._passes = [[rows if self.cross else self._own(rows, rows.queries)] for _, _, rows in heard.parts]
        self._moved: Tensor | None = None
        self.sums = SlotSums()
        self.taken_back = False
        self.queries = 0
        self._check_cache(heard)
        self.queries = heard.queries

    def onward(self, keys: int) -> Onward:
        """How the map of the next pass over so many keys goes on. Raises SinkscopeError for sequences that the first
        pass padded at their ends."""
        if not self._cuts:
            return Onward(None, [self.queries])
        firsts, passes = self._order(self._cuts), self._order(self._passes)
        befores = [sum(rows.queries for rows in own) for own in passes]
        if self.cross:
            return Onward([cut.keys_alone(row) for row, cut in enumerate(firsts)], befores)
        cuts = list[Cut]()
        for row, first in enumerate(firsts):
            start, stop, length = first.valid(self.queries)
            if stop < length:
                raise SinkscopeError(BEHIND)
            cuts.append(Cut(row, None, ((start, keys), keys)))
        return Onward(cuts, befores)

    def add(self, heard: Heard, live: Tensor | None) -> None:
        """Adds the map of a pass. `live` [B]: the sequences that have not ended; None where all go on.

        Raises SinkscopeError where its keys are not those of the tokens so far.
        """
        assert heard.parts is not None
        self.check_whole()
        self._apply_move()
        if len(heard.parts) != len(self._passes):
            raise SinkscopeError(f"{self.name} attends over other sequences in a later pass over a cache: not read")
        if not self._cuts and heard.rows != (held := self._passes[0][0].first.shape[0]):
            raise SinkscopeError(
                f"the cache of {self.name} holds {heard.rows} sequences after {held}: such a batch is not read"
            )
        self._check_cache(heard)
        for number, (_, cut, rows) in enumerate(heard.parts):
            passes = self._passes[number]
            passes.append(self._fitting(rows, passes))
            if live is not None:
                passes[-1] = passes[-1].weighed(live if cut is None else live[cut.batch_row])
            if len(passes) > TOGETHER:
                self._passes[number] = [following(passes)]
        self.queries += heard.queries

    def _check_cache(self, heard: Heard) -> None:
        """Raises SinkscopeError where the cache changed keys or values that earlier queries have seen."""
        if self.cross or heard.key is None or heard.value is None:
            return
        before, total = self.queries, self.queries + heard.queries
        key, value = heard.key[:, :, :total], heard.value[:, :, :total]
        changed = self.sums.changed(key, value, before) if before else None
        if changed is not None and bool(changed):
            raise SinkscopeError(
                f"{self.name} computes attention in its own code, over a cache that changed keys or values between two "
                "passes: this is not read"
            )
        self.sums.keep(key, value)

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those that the last pass had at `rows`."""
        self._moved = rows if self._moved is None else self._moved[rows]
        self.sums.move(rows)

    def _order(self, things: list[Thing]) -> list[Thing]:
        return things if self._moved is None else [things[row] for row in self._moved.tolist()]

    def _apply_move(self) -> None:
        """An order that no pass comes after is left out: no sequence went on in it."""
        if self._moved is None:
            return
        whole = [following(passes) for passes in self._passes]
        if self._cuts:
            self._passes = [[whole[row]] for row in self._moved.tolist()]
            self._cuts = self._order(self._cuts)
        else:
            order = self._moved.to(whole[0].first.device)
            self._passes = [[whole[0].changed(lambda tensor: tensor.index_select(0, order))]]
        self._moved = None

    def _fitting(self, rows: MapRows, passes: list[MapRows]) -> MapRows:
        if not self.cross:
            return self._own(rows, sum(each.queries for each in passes) + rows.queries)
        if rows.keys != passes[0].keys:
            raise SinkscopeError(f"{self.name} attends to {rows.keys} keys after {passes[0].keys} of another text")
        return rows

    def _own(self, rows: MapRows, total: int) -> MapRows:
        """The rows without the keys that a static cache has still to fill."""
        if rows.keys < total or bool(rows.seen_by[..., total:].any()):
            raise SinkscopeError(f"{self.name} attends to {rows.keys} keys where its cache holds {total} tokens")
        return rows.changed(lambda sums: sums[..., :total], KEYS)

    def check_whole(self) -> None:
        """Raises SinkscopeError where the cache took tokens back: the sums do not tell what these had."""
        if self.taken_back:
            raise SinkscopeError(f"{self.name} computes attention in its own code, of tokens that its cache took back")

    def parts(self) -> list[MapRows]:
        """What was taken of the whole batch (one), or of each sequence of a padded one. Raises as `check_whole`."""
        self.check_whole()
        return [following(passes) for passes in self._passes]
