"""Follows the sequences of a model that somebody else runs: which begin with a pass, which go on, and which end."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.batches import passes_of
from sinkscope.capture.heard import Pass, Share, not_followed
from sinkscope.capture.joined import Joined
from sinkscope.capture.listeners import cache_changes, text_ends
from sinkscope.capture.listening import Listener
from sinkscope.capture.own_cache import OwnCache, may_keep_keys, reads_earlier_keys
from sinkscope.capture.precision import undisturbing
from sinkscope.engine.watching.measured import not_read
from sinkscope.errors import in_one_line

SHARED = (
    "a request of a continuous batch whose first tokens another request computed (allow_block_sharing=False in its "
    "ContinuousBatchingConfig computes them anew; num_return_sequences=1)"
)

BROKEN = "a pass raised an error"
LEFT = "a sequence that left its batch before the others ended was not read"

CUT = (
    "a pass that goes on over a cache after label(), run(), reset() or the end of the block was not read: begin the "
    "text with a new cache"
)

ASKED = 8
"""Passes in a row that are heard only to learn whether they keep their keys. Each takes a third longer so; a model that
kept nothing in as many is not asked again before a pass that is measured does, so that `every` makes a watch cheap."""

ELSEWHERE = "passes in other threads were not measured: watch all threads (threads=True, or --threads)"

MISSED = "a pass at the same time as one of a continuous batch in another thread was not read"


class Follower:
    """Hears the passes of `model` through its `listener`, and hands every batch of sequences that has ended to
    `measure`, with the label it began under.

    `begin(first)` is told of the first pass of sequences over a cache, which are measured only when they have ended.
    `facts()` says what a pass that just ran computed in.
    `measure(joined, label)` returns how many sequences it measured, and raises where it cannot. `every`, `limit`,
    `until`: as in `watch`. `label`: that of the sequences that begin now. `anywhere`: in all threads.

    Attributes:
        begun: batches of sequences so far. measured: sequences measured, and those that are open.
        reasons: why sequences were left out, each with how often.
        without_attention: whether a pass made no attention call. seconds: our own work between passes.
    """

    def __init__(
        self, model: nn.Module, begin: Callable[[Pass], None], measure: Callable[[Joined, str], int],
        facts: Callable[[], dict[str, str | None]], every: int, limit: int | None, until: int | None, label: str,
        anywhere: bool = False,
    ) -> None:  # fmt: skip
        along = partial(cache_changes, self._changed), partial(text_ends, self._ends_by)
        self.listener = Listener(model, self._wants, self._ended, self.leave_out, along, anywhere)
        self._model, self._first, self._measure, self._facts = model, begin, measure, facts
        self._every, self._limit, self._until = every, limit, until
        self._open: dict[int, tuple[weakref.ref[Any], Joined | None, str]] = {}
        self.reset(label)

    def reset(self, label: str) -> None:
        """Forgets the sequences under way, but that they were."""
        self.label = label
        self._cut: dict[int, weakref.ref[Any]] = {key: cache for key, (cache, *_) in self._open.items()}
        self._open = {}
        self._current: Joined | None = None
        self._latest: dict[int, weakref.ref[Joined]] = {}
        self._own: OwnCache | None = None
        self._kept_nothing = 0
        self.begun = self.measured = 0
        self.without_attention = False
        self.reasons: dict[str, int] = {}
        self.seconds = 0.0
        self.listener.missed.clear()
        self.listener.elsewhere = False
        self.listener.resume()

    def _wants(self, now: Pass) -> bool:
        with self.listener.lock:
            self._close_dead()
            self._current = None  # that of a pass which an interruption cut off
            if now.shares is not None:
                return self._wants_some(now, now.shares)
            if now.cache is None and self._own is not None:  # the pass itself shows whether it goes on
                self._end_long(id(self._own))
                now.resumes = partial(self._resume, now)
                return True
            wanted, self._current = self._turn(
                now.cache, now.before, "a cache that was filled outside the watch, or a copy of one,"
            )
            if self._current is not None:
                now.idle, now.onward = self._current.idle, self._current.onward
            asks = now.cache is None and not self._full and self._kept_nothing < ASKED
            now.asked = not wanted and asks and may_keep_keys(self._model)
            return wanted or now.asked

    def _wants_some(self, now: Pass, shares: list[Share]) -> bool:
        """Whether any request of a continuous batch is wanted; says so of each."""
        idle = list[frozenset[str] | None]()
        for share in shares:
            if not share.before and id(share.pages) in self._open:
                self._give_up(id(share.pages))  # its pages were taken from it,
                del self._open[id(share.pages)]  # and it begins anew
            share.wanted, joined = self._turn(share.pages, share.before, SHARED)
            if not share.wanted:
                self._open.setdefault(id(share.pages), (weakref.ref(share.pages), None, self.label))
            else:
                idle.append(None if joined is None else joined.idle)
        now.idle = None if None in idle else frozenset.intersection(*filter(None, idle)) if idle else None
        return bool(idle)

    def _resume(self, now: Pass, name: str, key: Tensor, value: Tensor, queries: int, ends: Callable[[], int]) -> None:
        """Lets a pass go on with the sequences over a cache of the model's own, where its keys are theirs."""
        joined = self._over_own
        if now.cache is not None or joined is None or name not in joined:
            return
        rows = joined.order(name, key, value, queries, ends)
        if rows is not None:
            self._move(joined, rows)
            now.cache, now.before, now.onward, self._current = self._own, joined.length, joined.onward, joined

    def _move(self, joined: Joined, rows: Tensor) -> None:
        """Goes on with the sequences at `rows`. Those that left a batch which became smaller are told of; where it did
        not, as in beam search, others took their place."""
        order, before = rows.tolist(), joined.batch or 0
        if order != [*range(before)]:
            joined.move(rows)
        if len(order) < before:
            for _ in range(before - len({*order})):
                self.leave_out(LEFT)

    def _begins(self, now: Pass) -> bool:
        """Whether a pass that goes on over no cache that is open begins sequences that are wanted. It ends those that
        are open over a cache of the model's own."""
        nothing = not now.heard and now.refused is None and now.over_cache is None
        if nothing or (self._over_own is None and reads_earlier_keys(self._model, now)):
            return False
        self._close(id(self._own))
        self._own = None
        wanted, _ = self._turn(None, 0, "")
        if not wanted:
            self._begin_own(None)
        return wanted

    @property
    def _over_own(self) -> Joined | None:
        """The sequences that are open over a cache of the model's own; None where they are not measured."""
        return self._open.get(id(self._own), (None, None, ""))[1]

    def _begin_own(self, joined: Joined | None) -> OwnCache:
        self._kept_nothing = 0
        self._own = OwnCache()
        self._begin(self._own, joined)
        return self._own

    def _turn(self, cache: Any, before: int, outside: str) -> tuple[bool, Joined | None]:
        """Whether a pass over a cache that held `before` tokens is wanted, and the sequences that it goes on with.

        `outside`: what a cache is called which was filled when nobody listened.
        """
        if cache is not None and before:
            entry = self._open.get(id(cache))
            if entry is None or entry[0]() is not cache:
                self._leave_out_cache(CUT if self._was_cut(cache) else f"{outside} was not read")
                return False, None
            joined = self._end_long(id(cache), before)
            if self._was_cut(cache):
                self._leave_out_cache(CUT)
            return joined is not None, joined
        if cache is not None:
            self._close(id(cache))  # it was emptied
        self.begun += 1
        wanted = not self._full and (self.begun - 1) % self._every == 0
        if not wanted and cache is not None:
            self._begin(cache, None)
        return wanted, None

    def _was_cut(self, cache: Any) -> bool:
        """Whether the sequences over a cache were ended while it may go on."""
        cut = self._cut.get(id(cache))
        return cut is not None and cut() is cache

    def _leave_out_cache(self, why: str) -> None:
        """Notes a pass over a cache that is not measured, unless a measurement of some sequences alone explains it."""
        if self._every == 1 and not self._full:
            self.leave_out(why)

    def _end_long(self, key: int, before: int | None = None) -> Joined | None:
        """Measures the sequences that are open over a cache where they have `until` positions; returns them where they
        go on. `before`: the positions in the cache, where they are known: fewer than the sequences have would mean that
        some were taken back, which the next pass shows."""
        entry = self._open.get(key)
        joined = None if entry is None else entry[1]
        if entry is None or joined is None or self._until is None or joined.length < self._until:
            return joined
        if before in (None, joined.length):
            self._close(key)
            self._open[key] = entry[0], None, entry[2]
        return self._open[key][1]

    @property
    def _full(self) -> bool:
        return self._limit is not None and self.measured >= self._limit

    def _ended(self, now: Pass, failed: bool) -> None:
        with self.listener.lock:
            joined, self._current = self._current, None
            if now.asked:
                self._pass_over(now, failed)
                return
            if now.shares is None:
                if now.resumes is None or now.cache is self._own or self._begins(now):
                    self._add(now, joined, failed)
                return
            for share, share_pass in passes_of(now):
                _, joined, _ = self._open.get(id(share.pages), (None, None, ""))
                if joined is not None and share.before < joined.length:
                    joined.take_back(joined.length - share.before)  # its pages were taken from it, and given back
                self._add(share_pass, joined, failed)

    def _pass_over(self, now: Pass, failed: bool) -> None:
        """Notes of a pass that is not wanted whether its next steps are, therefore, not wanted either."""
        if not failed and not now.heard and now.refused is None:
            self.begun -= 1
        elif not failed and now.keeps is not None and self._keeps(now.keeps):
            self._begin_own(None)
        else:
            self._kept_nothing += 1
        now.keeps = None

    def _keeps(self, keeps: Callable[[], bool]) -> bool:
        try:
            with undisturbing():
                return keeps()
        except Exception:  # whatever it is, the pass is somebody else's and goes on
            return False

    def _add(self, now: Pass, joined: Joined | None, failed: bool) -> None:
        """Adds a pass to the sequences that it goes on with, `joined`; None where they begin."""
        if failed:
            self._broken_off(now, joined)
            return
        began = time.perf_counter()
        if not now.heard and now.refused is None and (joined is None or not joined.length):
            self.begun -= 1  # a pass without attention, such as an embedding alone
            self.without_attention = True
            if now.over_cache is not None:
                self.leave_out(not_followed(*now.over_cache))
            elif now.unmatched:
                self.leave_out(not_read(now.unmatched))
            return
        try:
            fresh, keeps = joined is None, now.keeps
            joined = Joined(self._model, self._facts()) if joined is None else joined
            with undisturbing():
                if fresh and keeps is not None and keeps():
                    now.cache = self._begin_own(None)
                if fresh and now.cache is not None:
                    self._first(now)
                joined.add(now)
                self._latest[get_ident()] = weakref.ref(joined)
                if now.cache is None:
                    self._measure_now(joined, self.label)
                elif fresh:
                    self.measured += now.batch or 1
                    self._begin(now.cache, joined)
        except Exception as error:  # whatever it is, the pass is somebody else's and goes on
            self.leave_out(in_one_line(error))
            self._forget(now)
        now.cache = now.keeps = now.resumes = None  # its end is the sequence's: nothing here keeps it alive
        self.seconds += time.perf_counter() - began

    def _broken_off(self, now: Pass, joined: Joined | None) -> None:
        """Measures the sequences that a pass goes on with up to the pass before, since it raised an error; none where
        they began with it."""
        if joined is not None and joined.length and now.cache is not None:
            self.leave_out(f"{BROKEN}: its sequences are measured up to the pass before")
            self._begin(now.cache, None)  # which closes them
            return
        if now.heard:
            self.leave_out(f"{BROKEN}: its sequences were left out")
        self._forget(now)

    def _changed(self, cache: Any, what: Tensor | int | None) -> None:
        """Told of what is done to a cache between two passes, and before that (None)."""
        reference, joined, _ = self._open.get(id(cache), (None, None, ""))
        if joined is None or reference is None or reference() is not cache:
            return
        try:
            with undisturbing():
                if what is None:
                    joined.settle()
                elif isinstance(what, int):
                    joined.take_back(what)
                else:
                    joined.move(what.detach().clone())
        except Exception as error:  # whatever it is, the cache is somebody else's and goes on
            self.leave_out(in_one_line(error))
            self._give_up(id(cache))

    def _ends_by(self, ids: Tensor, tokens: list[int], over: Tensor) -> None:
        """Told of the token ids [B, T] that `generate` has, the tokens that end a text, and which texts are over."""
        latest = self._latest.get(get_ident())
        joined = None if latest is None else latest()
        if joined is not None:
            with suppress(Exception), undisturbing():  # whatever it is, the generation is somebody else's and goes on
                joined.ends_by(ids, tokens, over)

    def _forget(self, now: Pass) -> None:
        entry = None if now.cache is None else self._open.get(id(now.cache))
        if entry is not None and entry[0]() is now.cache:
            self._give_up(id(now.cache))
        elif now.cache is not None:
            self._begin(now.cache, None)

    def _begin(self, cache: Any, joined: Joined | None) -> None:
        """Opens the sequences over a cache; None where they are not measured."""
        self._close(id(cache))  # a cache that is gone may have had this number
        self._open[id(cache)] = weakref.ref(cache), joined, self.label

    def _give_up(self, key: int) -> None:
        """Measures nothing of the sequences that are open over a cache, now or later."""
        cache, joined, label = self._open[key]
        if joined is not None:
            self.measured -= joined.first.batch or 1
        self._open[key] = cache, None, label

    def leave_out(self, why: str) -> None:
        """Notes why sequences, or calls of theirs, are not measured, and warns of it the first time."""
        if why not in self.reasons:
            with suppress(Warning):  # where warnings are errors
                warnings.warn(f"sinkscope: {why}", stacklevel=2)
        self.reasons[why] = self.reasons.get(why, 0) + 1

    def _close_dead(self) -> None:
        self._give_up_missed()
        for key in [key for key, (cache, *_) in self._open.items() if cache() is None]:
            self._close(key)

    def close_all(self) -> None:
        self._give_up_missed()
        for key, (cache, joined, label) in [*self._open.items()]:
            cut = joined is not None or key in self._cut
            self._close(key)
            if cache() is not None:
                self._open[key] = cache, None, label
                if cut:
                    self._cut[key] = cache

    def _give_up_missed(self) -> None:
        """Measures no sequence of which a pass was not heard: without its last pass it would look whole."""
        while self.listener.missed:
            missed = self.listener.missed.pop()
            # Python keeps one plain reference to each object, so that of a cache which is gone is found too.
            key = next((key for key, (reference, *_) in self._open.items() if reference is missed), None)
            cache = None if missed is None else missed()
            if key is not None:
                self._give_up(key)
            elif missed is not None and cache is not None:
                self._begin(cache, None)
            if self._every == 1 and not self._full:
                self.leave_out(MISSED)

    def _close(self, key: int) -> None:
        self._cut.pop(key, None)
        _, joined, label = self._open.pop(key, (None, None, ""))
        if joined is None:
            return
        self.measured -= joined.first.batch or 1
        began = time.perf_counter()
        try:
            with undisturbing():
                self._measure_now(joined, label)
        except Exception as error:  # whatever it is, the pass is somebody else's and goes on
            self.leave_out(in_one_line(error))
        self.seconds += time.perf_counter() - began

    def _measure_now(self, joined: Joined, label: str) -> None:
        self.measured += self._measure(joined, label)
        if self._full and not any(open_one for _, open_one, _ in self._open.values()):
            self.listener.rest()
