"""`watch`: measures the attention of a model in the passes that somebody else runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from sinkscope.capture.alone import alone
from sinkscope.capture.joined import Joined
from sinkscope.capture.views import Views
from sinkscope.checkpoints import wrap_running
from sinkscope.checkpoints.checkpoint import computed_now
from sinkscope.engine.record import GrowingRecord
from sinkscope.engine.watching.domains import Heap, Watched
from sinkscope.engine.watching.following import ELSEWHERE, Follower
from sinkscope.engine.watching.measured import Measurer, Sequences, from_one, of_few_tokens
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.request import WATCHED, make_request
from sinkscope.runs.run import Run
from sinkscope.tables.columns import metric_set

LABEL = "watched"
"""The domain of what is measured before the first `label`."""
SIGNALS = "signals"
"""The end of the name of a domain of pictures or recordings that were not as many as the texts beside them."""


class Watch:
    """A model that is watched. It is a context manager: what the model computes inside the block is measured.

    Attributes:
        left_out: why sequences were not measured, each reason once, with how many it concerns.
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, name: str | None = None, every: int = 1, limit: int | None = None,
        until: int | None = None, epsilon: float = EPSILON, dormant_rule: str = DORMANT_RULE,
        lengths: Sequence[int] | None = None, spectra: int | None = None,
        metrics: Sequence[Callable[..., Any] | str | Path] = (), threads: bool = False,
    ) -> None:  # fmt: skip
        for value, what, least in ((every, "every", 1), (limit, "limit", 1), (until, "until", 2)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise SinkscopeError(f"{what}={value!r}: a whole number from {least} on is needed")
        self._checkpoint = wrap_running(model, tokenizer, name)
        self._request = make_request(
            model=self._checkpoint.name, given=WATCHED, epsilon=epsilon, dormant_rule=dormant_rule,
            lengths=None if lengths is None else tuple(lengths), spectra=spectra, self_check=False,
        )  # fmt: skip
        measured = metric_set(metrics).asked(())
        check_rule(dormant_rule, measured.names("heads"))
        self._quantities = quantity_set(measured, self._request.lengths)
        self._views = Views(self._checkpoint.model, epsilon, weights_change=True)
        self._measurer = Measurer(self._checkpoint.model, self._views, self._quantities, spectra)
        self._heaps: dict[str, Heap] = {}
        self._started = time.perf_counter()
        self._follower = Follower(
            self._checkpoint.model, self._measurer.begin, self._measure, partial(computed_now, self._checkpoint), every,
            limit, until, LABEL, threads,
        )  # fmt: skip
        self._threads = threads
        self._listener = self._follower.listener
        self._stack: ExitStack | None = None

    def __enter__(self) -> Watch:
        if self._stack is not None:
            raise SinkscopeError("this watch is active already: end its `with` block before you enter it again")
        with ExitStack() as stack:
            stack.enter_context(alone(f"a watch of {self._checkpoint.name}", listens=True, anywhere=self._threads))
            stack.enter_context(self._listener.listening())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        with self._listener.lock:
            stack.close()
            self._follower.close_all()

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
            self._follower.close_all()
            self._follower.label = shown

    def reset(self) -> None:
        """Forgets everything measured so far, and the sequences under way."""
        with self._listener.lock:
            self._heaps = {}
            self._measurer.unfinished.drop()
            self._follower.reset(LABEL)
            self._started = time.perf_counter()

    @property
    def left_out(self) -> list[str]:
        """Why sequences were not measured, each reason once, with how many times it came."""
        reasons = [why if count == 1 else f"{why} ({count} times)" for why, count in self._follower.reasons.items()]
        return [*reasons, ELSEWHERE] if self._listener.elsewhere else reasons

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
            self._follower.close_all()
            if not self.sequences:
                raise SinkscopeError(self._why_nothing())
            self._measurer.unfinished.finish()
            watched = Watched(self._checkpoint, self._request, self._heaps, self._quantities, self._measurer)
            watched.keywords, watched.failures = self._listener.keywords, self._views.failures
            watched.left_out += self.left_out
            watched.seconds = self._follower.seconds
            return watched.run(self._started)

    def _measure(self, joined: Joined, label: str) -> int:
        sequences = self._into_heap(joined, label, False)
        if sequences is None:
            return 0
        if joined.first.signals not in (None, sequences.count):
            self._into_heap(joined, f"{label}, {SIGNALS}", True)
        return sequences.count

    def _into_heap(self, joined: Joined, label: str, signals: bool) -> Sequences | None:
        heap = self._heaps.get(label) or Heap(lambda: GrowingRecord(self._quantities))
        sequences = self._measurer.measure(joined, heap.count, signals)
        if sequences is not None:
            if sequences.pooled:
                self._follower.leave_out(from_one(sequences.pooled))
            if sequences.partial:
                self._follower.leave_out(of_few_tokens(sequences.partial))
            heap.add(sequences)
            self._heaps[label] = heap
        return sequences

    def _why_nothing(self) -> str:
        if self._follower.reasons:
            return f"nothing was measured: {next(iter(self.left_out))}"
        if self._follower.begun or self._follower.without_attention:
            return (
                f"no attention of {self._checkpoint.name} was read: it has none, computes it in a way that is not read "
                "(docs/watch.md names those that are), or attends over one position at a time"
            )
        return f"{self._checkpoint.name} was not run in the `with` block, or not since reset()" + (
            "" if self._threads else ", by the thread that entered it: threads=True watches all threads"
        )


def watch(
    model: Any, *, tokenizer: Any = None, name: str | None = None, every: int = 1, limit: int | None = None,
    until: int | None = None, epsilon: float = EPSILON, dormant_rule: str = DORMANT_RULE,
    lengths: Sequence[int] | None = None, spectra: int | None = None,
    metrics: Sequence[Callable[..., Any] | str | Path] = (), threads: bool = False,
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
        until: ends a sequence over a cache once it has as many positions, padding counted; its first pass is measured
            whole. What is kept of a sequence until it ends is then no more than of so many positions, or of that pass.
        epsilon, dormant_rule, lengths, spectra, metrics: as in `sinkscope.scan`.
        threads: also measures passes in other threads than the one that enters the block. Passes then take turns.

    Returns:
        A Watch: enter it with `with`. `run()` gives the Run, `label(name)` begins a domain, `reset()` forgets.

    Raises:
        SinkscopeError: a model that is no module, or whose weights are spread over processes; on entering, also where
            another thread of this process measures.
    """
    return Watch(
        model, tokenizer=tokenizer, name=name, every=every, limit=limit, until=until, epsilon=epsilon,
        dormant_rule=dormant_rule, lengths=lengths, spectra=spectra, metrics=metrics, threads=threads,
    )  # fmt: skip
