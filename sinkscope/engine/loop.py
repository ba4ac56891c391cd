"""Runs a scan's batches through the watched model, with a collector per domain; makes them smaller where it must."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from accelerate.utils import release_memory

from sinkscope.capture import Capture, Plan, Site
from sinkscope.capture.watch import NotTogether
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.batch_size import chosen_batch, is_out_of_memory, not_square, overflow_words, what_would_fit
from sinkscope.engine.collector import Collector, Parts
from sinkscope.engine.input_kinds.kind import Reading
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.measurement import Measurement
from sinkscope.engine.places import places_of
from sinkscope.engine.record import BatchRecord
from sinkscope.engine.shards import Shard, Shards
from sinkscope.engine.tensor_parallel import HeadShards
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import Batch, batches
from sinkscope.metrics.guests import Guests
from sinkscope.metrics.quantities import QuantitySet, quantity_set
from sinkscope.tables.values import Domain, PlacesOf

Progress = Callable[[str, int, int], None]
"""Called with (stage, sequences done, sequences in all); stages are `loading`, `checking`, `scanning`, and `compiling`
where a scan waits for loops to be compiled, once after an installation."""

Piece = tuple[int, int, int]
"""Sequences to measure: (domain, first, past the last)."""


@dataclass(frozen=True)
class _Outcome:
    """What a process tells the others of one round: its batch, whether it has more, why Triton and metrics of others
    have failed, and the seconds of these metrics."""

    batch: Shard | None
    more: bool
    failures: list[str]
    failed: dict[str, str]
    seconds: dict[str, float]


@dataclass
class Loop:
    """The state of one scan.

    Attributes:
        batch_size: sequences in a forward pass; None = chosen by the device.
        shards: keeps each batch on disk for a scan that resumes; None keeps none.
        measurements: those that were asked for. left_out: sentences about those that `--measure all` leaves out.
        spectra: sequences of each domain for sampled metrics; None = as many as are cheap.
        declared: the metrics and quantities declared when the scan began.
        processes: they share the sequences. heads: how they share the heads, under --tp.
        smallest_batch: the smallest batch size so far.
        seconds: time spent in forward passes and metrics.
        failures: why Triton failed, in any process.
        strict: end the scan where a metric of others fails.
        guest_seconds: time that each metric of others took, in all processes.
    """

    checkpoint: Checkpoint
    plan: Plan
    forward: Forward
    reading: Reading
    epsilon: float
    report: Progress
    batch_size: int | None = None
    shards: Shards | None = None
    measurements: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    spectra: int | None = None
    declared: QuantitySet = field(default_factory=quantity_set)
    processes: Processes = ALONE
    heads: HeadShards | None = None
    smallest_batch: int | None = None
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    strict: bool = False
    guest_seconds: dict[str, float] = field(default_factory=dict)
    _records: list[BatchRecord] = field(default_factory=list)
    _fits: int | None = None

    @property
    def sites(self) -> list[Site]:
        """The attention calls with all their heads, including those of other processes."""
        return self.plan.sites if self.heads is None else self.heads.whole_sites(self.plan.sites)

    @property
    def quantities(self) -> QuantitySet:
        """What the scan measures."""
        return self.declared.extended(
            quantity for measurement in self.measurements for quantity in measurement.quantities()
        )

    @cached_property
    def guests(self) -> Guests:
        """The metrics of others among what the scan measures."""
        return Guests(self.declared.metrics)

    @property
    def done(self) -> int:
        """Sequences measured so far, over all domains."""
        return sum(record.count for record in self._records)

    def run(self) -> None:
        """Measures every sequence. After an interruption `domains` still returns what was measured.

        In a launch, each process measures one batch a round; then all receive the batches of all.
        Raises SinkscopeError: out of memory with one sequence; a layer that gives NaN or infinity; another process that
        measures into the folder of the shards.
        """
        self._records = [BatchRecord(self.quantities) for _ in self.reading.tokens]
        self._watches = [self._watch(data.longest) for data in self.reading.tokens]
        with ExitStack() as ended:
            self.processes.on_main(partial(self._hold, ended))
            self._run()

    def _hold(self, ended: ExitStack) -> None:
        """Lets no other process measure into the folder of the shards until `ended`."""
        if self.shards is not None:
            ended.enter_context(self.shards.held())

    def _run(self) -> None:
        self._restore()
        work = deque(self.processes.share(self._pieces()))
        left = [self.done < self.reading.total]
        while any(left):
            began = time.perf_counter()
            outcomes = self.processes.together(lambda: self._outcome(work))
            left = [outcome.more for outcome in outcomes]
            self.failures = list(dict.fromkeys(why for outcome in outcomes for why in outcome.failures))
            self._learn([outcome.failed for outcome in outcomes])
            self.guest_seconds = {
                name: sum(outcome.seconds[name] for outcome in outcomes) for name in outcomes[0].seconds
            }
            self._keep([outcome.batch for outcome in outcomes if outcome.batch is not None])
            self.seconds += time.perf_counter() - began

    def _outcome(self, work: deque[Piece]) -> _Outcome:
        batch = self._next(work)
        return _Outcome(batch, bool(work), self.plan.failures, self.guests.failed, self.guests.seconds)

    def _learn(self, failed: list[dict[str, str]]) -> None:
        """Takes over why metrics of others failed, in any process. Raises SinkscopeError with `strict`."""
        for reasons in failed:
            self.guests.learn(reasons)
        if self.strict and self.guests.failed:
            raise SinkscopeError(f"--strict: {self.guests.left_out[0]}{self._kept()}")

    def _kept(self) -> str:
        """What the end of a strict scan leaves on disk, and who can use it: a metric that is mended is another one."""
        if self.shards is None or not self.done:
            return ""
        return (
            f"; {self.done} of {self.reading.total} sequences are kept in {self.shards.folder}: --resume without "
            "--strict goes on without this metric, --force starts anew"
        )

    def domains(self) -> list[Domain]:
        """Returns what was measured so far, by domain; without the columns of metrics of others that failed."""
        domains = []
        names = {site.name for site in self.sites}
        for corpus, record in zip(self.reading.corpora, self._records, strict=False):
            values = {name: site_values.without(self.guests.failed) for name, site_values in record.values().items()}
            if values:
                others = {name: values.pop(name) for name in values.keys() - names}
                domains.append(Domain(corpus, values, dict(sorted(others.items()))))
        return domains

    def places(self, domains: list[Domain]) -> PlacesOf:
        """What stands at the keys of every attention call."""
        return places_of(self, domains)

    @property
    def decoder_input(self) -> str | None:
        """What a decoder reads besides the sequences, for the manifest."""
        return self.reading.decoder_input or self.forward.decoder_input

    def _watch(self, length: int) -> tuple[Capture, Collector]:
        """Returns the capture that watches a domain's batches, and the collector that it fills."""
        # Under --tp every process sees the same residual stream: the main process alone measures the sampled metrics.
        sampled = 0 if self.processes.tensor and self.processes.index else self.spectra
        collector = Collector(length, self.quantities, sampled)
        mean, whole = (None, None) if self.heads is None else (self.heads.mean, self.heads.whole_count)
        capture = Capture(
            self.checkpoint.model, self.plan, collector.add, self.epsilon, head_mean=mean, layer_heads=whole,
            readers={measurement.name: measurement.of_call for measurement in self.measurements},
            writing=any(measurement.writing for measurement in self.measurements),
        )  # fmt: skip
        return capture, collector

    def _restore(self) -> None:
        """Takes the batches that an earlier scan left on disk."""
        shards = self.shards
        kept = [] if shards is None else self.processes.on_main(lambda: list(shards.read(self.quantities)))
        self._take(kept)
        self._learn([shard.failed for shard in kept])
        self._fits = min((shard.fits for shard in kept if shard.fits is not None), default=None)

    def _take(self, batches: list[Shard]) -> None:
        for batch in batches:
            self._records[batch.domain].keep(batch.start, batch.count, batch.parts)
            sizes = (batch.size, self.smallest_batch)
            self.smallest_batch = min(size for size in sizes if size is not None)
        self.report("scanning", self.done, self.reading.total)

    def _keep(self, batches: list[Shard]) -> None:
        """Keeps finished batches, on disk first, then in memory."""
        if self.heads is not None:
            batches = [self.heads.whole(batches, self.quantities)]
        batches = [replace(batch, failed=self.guests.failed) for batch in batches]
        shards = self.shards
        if shards is not None:
            self.processes.on_main(lambda: shards.write(batches, self.quantities))
        self._take(batches)

    def _pieces(self) -> list[Piece]:
        """Returns the sequences still to measure, in the batches of a scan that was never interrupted."""
        pieces = []
        for domain, (data, record) in enumerate(zip(self.reading.tokens, self._records, strict=True)):
            size = self._size(domain)
            for first, last in record.gaps(len(data.ids)):
                edges = [first, *range((first // size + 1) * size, last, size), last]
                pieces += [(domain, *edge) for edge in itertools.pairwise(edges)]
        return pieces

    def _size(self, domain: int) -> int:
        """The batch size of a domain while memory suffices."""
        data = self.reading.tokens[domain]
        if data.extras is not None:
            return 1
        share = len(data.ids) if self.processes.tensor else -(-len(data.ids) // self.processes.count)
        return self.batch_size or min(share, chosen_batch(data.ids.shape[1], self.checkpoint.device))

    def _next(self, work: deque[Piece]) -> Shard | None:
        """Measures the next batch: a smaller one where memory runs out, of one sequence where the model attends over
        one at a time. Returns None where no work is left."""
        if not work:
            return None
        domain, start, stop = work.popleft()
        data = self.reading.tokens[domain]
        while True:
            size = min(self._size(domain), self._fits or self._size(domain))
            try:
                count = not_square(min(size, stop - start), data.ids.shape[1])
                batch = next(batches(data, start, count, self.checkpoint.device))
                parts = self._one_batch(domain, batch)
                break
            except NotTogether:
                if size == 1:
                    raise
                self._fits = 1
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.processes.tensor:
                    raise
                if size == 1:
                    raise SinkscopeError(what_would_fit(data.ids.shape[1])) from None
                self._fits = size // 2
                release_memory()
        if start + count < stop:
            work.appendleft((domain, start + count, stop))
        return Shard(domain, start, count, size, self._fits, parts)

    def _one_batch(self, domain: int, batch: Batch) -> Parts:
        """Runs one batch of a domain through the model and returns its quantities."""
        capture, collector = self._watches[domain]
        ids = self.reading.corpora[domain].ids[batch.start : batch.start + len(batch)]
        collector.begin(batch.start)
        try:
            with ExitStack() as stack:
                for measurement in self.measurements:  # before the capture, whose views then find what they watched
                    stack.enter_context(measurement.watching(batch, ids))
                sequences = None if batch.extra else len(batch)  # pictures may be several for one text
                stack.enter_context(capture.watching(batch.spans, batch.inputs.shape[1], sequences))
                self.forward(batch.inputs, batch.mask, **batch.extra)
            for measurement in self.measurements:
                measurement.again(batch)
            bad = collector.bad_site(self.plan.sites)
            if bad is not None:
                raise SinkscopeError(_why_not_finite(self.checkpoint, bad.layer, bad.module))
            self.checkpoint.check_unchanged()
            parts = collector.commit()
            for measurement in self.measurements:
                parts |= measurement.parts()
            return parts
        except BaseException:
            collector.drop()
            raise


def _why_not_finite(checkpoint: Checkpoint, layer: int, module: str) -> str:
    """Blames the dtype: the weights are finite, as loading checked."""
    return (
        f"layer {layer} ({module}) gives NaN or infinity although all weights are finite: "
        f"{overflow_words(checkpoint.facts['dtype'])}"
    )
