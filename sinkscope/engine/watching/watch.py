"""`watch`: measures the attention of a model in the passes that somebody else runs."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.alone import alone
from sinkscope.capture.batches import passes_of
from sinkscope.capture.heard import Pass, Share, not_followed
from sinkscope.capture.joined import Joined
from sinkscope.capture.listeners import cache_changes
from sinkscope.capture.listening import Listener
from sinkscope.capture.precision import undisturbing
from sinkscope.capture.views import Views
from sinkscope.checkpoints import wrap_running
from sinkscope.engine.record import GrowingRecord
from sinkscope.engine.watching.domains import Heap, Watched
from sinkscope.engine.watching.measured import Measurer, not_read
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.request import make_request
from sinkscope.runs.run import Run
from sinkscope.tables.columns import metric_set

LABEL = "watched"
"""The domain of what is measured before the first `label`."""

SHARED = (
    "a request of a continuous batch whose first tokens another request computed (allow_block_sharing=False in its "
    "ContinuousBatchingConfig computes them anew; num_return_sequences=1)"
)


MISSED = "a pass at the same time as one of a continuous batch in another thread was not read"


class Watch:
    """A model that is watched. It is a context manager: what the model computes inside the block is measured.

    Attributes:
        left_out: why sequences were not measured, each reason once, with how many it concerns.
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, name: str | None = None, every: int = 1, limit: int | None = None,
        epsilon: float = EPSILON, dormant_rule: str = DORMANT_RULE, lengths: Sequence[int] | None = None,
        spectra: int | None = None, metrics: Sequence[Callable[..., Any] | str | Path] = (),
    ) -> None:  # fmt: skip
        for value, what, least in ((every, "every", 1), (limit, "limit", 1)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise SinkscopeError(f"{what}={value}: a whole number from {least} on is needed")
        self._checkpoint = wrap_running(model, tokenizer, name)
        self._request = make_request(
            model=self._checkpoint.name, given="watched passes", epsilon=epsilon, dormant_rule=dormant_rule,
            lengths=None if lengths is None else tuple(lengths), spectra=spectra, self_check=False,
        )  # fmt: skip
        measured = metric_set(metrics).asked(())
        check_rule(dormant_rule, measured.names("heads"))
        self._quantities = quantity_set(measured, self._request.lengths)
        self._views = Views(self._checkpoint.model, epsilon, weights_change=True)
        self._measurer = Measurer(self._checkpoint.model, self._views, self._quantities, spectra)
        self._listener = Listener(self._checkpoint.model, self._wants, self._ended, self._leave_out)
        self._every, self._limit = every, limit
        self._stack: ExitStack | None = None
        self.reset()

    def __enter__(self) -> Watch:
        if self._stack is not None:
            raise SinkscopeError("this watch is active already: end its `with` block before you enter it again")
        with ExitStack() as stack:
            stack.enter_context(alone(f"a watch of {self._checkpoint.name}", listens=True))
            stack.enter_context(self._listener.listening())
            stack.enter_context(cache_changes(self._changed))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        with self._listener.lock:
            stack.close()
            self._close_all()

    def rest(self) -> None:
        """Measures nothing more: no pass is heard until the block ends, and none costs anything."""
        self._listener.rest()

    @property
    def model(self) -> nn.Module:
        """The model that is watched, without what training libraries wrap around it."""
        return self._checkpoint.model

    @property
    def name(self) -> str:
        """Its name in the run."""
        return self._checkpoint.name

    def label(self, name: str) -> None:
        """Begins a condition: the sequences that begin from here on are the domain `name` of the run.

        Raises SinkscopeError for a name without a letter, which no table could show.
        """
        shown = str(name)
        if not shown.strip() or shown != shown.encode("utf-8", "replace").decode("utf-8"):
            raise SinkscopeError(f"label {shown!r}: a name that a table can show is needed")
        with self._listener.lock:
            self._close_all()
            self._label = shown

    def reset(self) -> None:
        """Forgets everything measured so far, and the sequences under way."""
        with self._listener.lock:
            self._label = LABEL
            self._heaps: dict[str, Heap] = {}
            self._open: dict[int, tuple[weakref.ref[Any], Joined | None, str]] = {}
            self._current: Joined | None = None
            self._begun = self._measured = 0
            self._without_attention = False
            self._listener.missed.clear()
            self._listener.resume()
            self._reasons: dict[str, int] = {}
            self._started, self._seconds = time.perf_counter(), 0.0

    @property
    def left_out(self) -> list[str]:
        """Why sequences were not measured, each reason once, with how many times it came."""
        return [why if count == 1 else f"{why} ({count} times)" for why, count in self._reasons.items()]

    @property
    def sequences(self) -> int:
        """Sequences measured so far."""
        return sum(heap.count for heap in self._heaps.values())

    def run(self) -> Run:
        """The run of all that was measured so far. Sequences under way end here: of a cache that goes on, nothing more
        is read.

        Raises SinkscopeError where nothing was measured, with the reason.
        """
        with self._listener.lock:
            self._close_all()
            if not self.sequences:
                raise SinkscopeError(self._why_nothing())
            watched = Watched(self._checkpoint, self._request, self._heaps, self._quantities, self._measurer)
            watched.keywords, watched.failures = self._listener.keywords, self._views.failures
            watched.left_out += self.left_out
            watched.seconds = self._seconds
            return watched.run(self._started)

    # what the listener tells

    def _wants(self, now: Pass) -> bool:
        with self._listener.lock:
            self._close_dead()
            if now.shares is not None:
                return self._wants_some(now, now.shares)
            wanted, self._current = self._turn(
                now.cache, now.before, "a cache that was filled outside the watch, or a copy of one,"
            )
            if self._current is not None:
                now.idle, now.onward = self._current.idle, self._current.onward
            return wanted

    def _wants_some(self, now: Pass, shares: list[Share]) -> bool:
        """Whether any request of a continuous batch is wanted; says so of each."""
        idle = list[frozenset[str] | None]()
        for share in shares:
            if not share.before and id(share.pages) in self._open:
                self._give_up(id(share.pages))  # its pages were taken from it,
                del self._open[id(share.pages)]  # and it begins anew
            share.wanted, joined = self._turn(share.pages, share.before, SHARED)
            if not share.wanted:
                self._open.setdefault(id(share.pages), (weakref.ref(share.pages), None, self._label))
            else:
                idle.append(None if joined is None else joined.idle)
        now.idle = None if None in idle else frozenset.intersection(*filter(None, idle)) if idle else None
        return bool(idle)

    def _turn(self, cache: Any, before: int, outside: str) -> tuple[bool, Joined | None]:
        """Whether a pass over a cache that held `before` tokens is wanted, and the sequences that it goes on with.

        `outside`: what a cache is called which was filled when nobody listened.
        """
        if cache is not None and before:
            entry = self._open.get(id(cache))
            if entry is None or entry[0]() is not cache:
                if self._every == 1 and not self._full:
                    self._leave_out(f"{outside} was not read")
                return False, None
            return entry[1] is not None, entry[1]
        if cache is not None:
            self._close(id(cache))  # it was emptied
        self._begun += 1
        wanted = not self._full and (self._begun - 1) % self._every == 0
        if not wanted and cache is not None:
            self._begin(cache, None)
        return wanted, None

    @property
    def _full(self) -> bool:
        return self._limit is not None and self._measured >= self._limit

    def _ended(self, now: Pass, failed: bool) -> None:
        with self._listener.lock:
            joined, self._current = self._current, None
            if now.shares is None:
                self._add(now, joined, failed)
                return
            for share, share_pass in passes_of(now):
                _, joined, _ = self._open.get(id(share.pages), (None, None, ""))
                if joined is not None and share.before < joined.length:
                    joined.take_back(joined.length - share.before)  # its pages were taken from it, and given back
                self._add(share_pass, joined, failed)

    def _add(self, now: Pass, joined: Joined | None, failed: bool) -> None:
        """Adds a pass to the sequences that it goes on with, `joined`; None where they begin."""
        if failed:
            self._forget(now)
            return
        began = time.perf_counter()
        if not now.heard and now.refused is None and (joined is None or not joined.length):
            self._begun -= 1  # a pass without attention, such as an embedding alone
            self._without_attention = True
            if now.over_cache is not None:
                self._leave_out(not_followed(*now.over_cache))
            elif now.unmatched:
                self._leave_out(not_read(now.unmatched))
            return
        try:
            with undisturbing():
                fresh = joined is None
                joined = Joined(self._checkpoint.model) if joined is None else joined
                joined.add(now)
                if now.cache is None:
                    self._measure(joined, self._label)
                elif fresh:
                    self._measured += now.batch or 1
                    self._begin(now.cache, joined)
        except Exception as error:  # whatever it is, the pass is somebody else's and goes on
            self._leave_out(in_one_line(error))
            self._forget(now)
        now.cache = None  # its end is the sequence's: nothing here keeps it alive
        self._seconds += time.perf_counter() - began

    def _changed(self, cache: Any, what: Tensor | int) -> None:
        reference, joined, _ = self._open.get(id(cache), (None, None, ""))
        if joined is None or reference is None or reference() is not cache:
            return
        try:
            with undisturbing():
                if isinstance(what, int):
                    joined.take_back(what)
                else:
                    joined.move(what.detach().clone())
        except Exception as error:  # whatever it is, the cache is somebody else's and goes on
            self._leave_out(in_one_line(error))
            self._give_up(id(cache))

    def _forget(self, now: Pass) -> None:
        entry = None if now.cache is None else self._open.get(id(now.cache))
        if entry is not None and entry[0]() is now.cache:
            self._give_up(id(now.cache))
        elif now.cache is not None:
            self._begin(now.cache, None)

    def _begin(self, cache: Any, joined: Joined | None) -> None:
        """Opens the sequences over a cache; None where they are not measured."""
        self._close(id(cache))  # a cache that is gone may have had this number
        self._open[id(cache)] = weakref.ref(cache), joined, self._label

    def _give_up(self, key: int) -> None:
        """Measures nothing of the sequences that are open over a cache, now or later."""
        cache, joined, label = self._open[key]
        if joined is not None:
            self._measured -= joined.passes[0].batch or 1
        self._open[key] = cache, None, label

    def _leave_out(self, why: str) -> None:
        if why not in self._reasons:
            with suppress(Warning):  # where warnings are errors
                warnings.warn(f"sinkscope: {why}", stacklevel=2)
        self._reasons[why] = self._reasons.get(why, 0) + 1

    # sequences

    def _close_dead(self) -> None:
        self._give_up_missed()
        for key in [key for key, (cache, *_) in self._open.items() if cache() is None]:
            self._close(key)

    def _close_all(self) -> None:
        self._give_up_missed()
        for key, (cache, joined, label) in [*self._open.items()]:
            self._close(key)
            if joined is not None and cache() is not None:
                self._open[key] = cache, None, label

    def _give_up_missed(self) -> None:
        """Measures no sequence of which a pass was not heard: without its last pass it would look whole."""
        while self._listener.missed:
            missed = self._listener.missed.pop()
            # Python keeps one plain reference to each object, so that of a cache which is gone is found too.
            key = next((key for key, (reference, *_) in self._open.items() if reference is missed), None)
            cache = None if missed is None else missed()
            if key is not None:
                self._give_up(key)
            elif missed is not None and cache is not None:
                self._begin(cache, None)
            if self._every == 1 and not self._full:
                self._leave_out(MISSED)

    def _close(self, key: int) -> None:
        _, joined, label = self._open.pop(key, (None, None, ""))
        if joined is None:
            return
        self._measured -= joined.passes[0].batch or 1
        began = time.perf_counter()
        try:
            with undisturbing():
                self._measure(joined, label)
        except Exception as error:  # whatever it is, the pass is somebody else's and goes on
            self._leave_out(in_one_line(error))
        self._seconds += time.perf_counter() - began

    def _measure(self, joined: Joined, label: str) -> None:
        heap = self._heaps.get(label) or Heap(lambda: GrowingRecord(self._quantities))
        sequences = self._measurer.measure(joined, heap.count)
        if sequences is not None:
            heap.add(sequences)
            self._heaps[label] = heap
            self._measured += sequences.count
            if self._full and not any(open_one for _, open_one, _ in self._open.values()):
                self._listener.rest()

    def _why_nothing(self) -> str:
        if self._reasons:
            return f"nothing was measured: {next(iter(self.left_out))}"
        if self._begun or self._without_attention:
            return (
                f"no attention of {self._checkpoint.name} was read: it has none, computes it in a way that is not read "
                "(docs/watch.md names those that are), or attends over one position at a time"
            )
        return (
            f"{self._checkpoint.name} was not run in the `with` block, by the thread that entered it: passes in other "
            "threads are not watched"
        )


def watch(
    model: Any, *, tokenizer: Any = None, name: str | None = None, every: int = 1, limit: int | None = None,
    epsilon: float = EPSILON, dormant_rule: str = DORMANT_RULE, lengths: Sequence[int] | None = None,
    spectra: int | None = None, metrics: Sequence[Callable[..., Any] | str | Path] = (),
) -> Watch:  # fmt: skip
    """Measures the attention of any model while your own code runs it.

        with sinkscope.watch(model) as seen:
            model(ids)
        run = seen.run()

    The model computes as without it: outputs and gradients are the same. Passes over one cache of keys and values, as
    in `model.generate`, are joined into one sequence. docs/watch.md says which attention is read, and what it costs.

    Args:
        model: any torch.nn.Module; every attention call below it is measured.
        tokenizer: gives token ids their texts in the tables.
        name: the model's name in the run; that of its configuration or class by default.
        every: measures each N-th batch of sequences. limit: measures no more once there are as many sequences.
        epsilon, dormant_rule, lengths, spectra, metrics: as in `sinkscope.scan`.

    Returns:
        A Watch: enter it with `with`. `run()` gives the Run, `label(name)` begins a domain, `reset()` forgets.

    Raises:
        SinkscopeError: a model that is no module, or whose weights are spread over processes; on entering, also where
            another thread of this process measures.
    """
    return Watch(
        model, tokenizer=tokenizer, name=name, every=every, limit=limit, epsilon=epsilon, dormant_rule=dormant_rule,
        lengths=lengths, spectra=spectra, metrics=metrics,
    )  # fmt: skip
