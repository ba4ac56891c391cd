"""The loop of a scan: batches through the watched model, one collector a domain; halves the batch when memory ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from accelerate.utils import release_memory
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from sinkscope.capture import Capture, LayerView, Plan
from sinkscope.checkpoints import Checkpoint
from sinkscope.errors import SinkscopeError
from sinkscope.forward import Forward
from sinkscope.inputs.batches import Batch, TokenData, batches
from sinkscope.measured import Collector, Domain, Parts
from sinkscope.reading import Reading
from sinkscope.shards import Shards

CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS = 2048, 16384

Progress = Callable[[str, int, int], None]
"""Called with (stage, sequences done, sequences in all); stages are `loading`, `checking`, `scanning`."""


@dataclass
class Loop:
    """One scan under way.

    Attributes:
        batch_size: sequences a forward pass; None = chosen by the device.
        shards: where each batch is kept on disk, and read from when the scan goes on; None keeps none.
        smoother: measures the smoothing table of a view; None where it is not asked for.
        done: sequences measured so far, over all domains.
        smallest_batch: the smallest batch that was tried.
        seconds: time spent in forward passes and metrics.
    """

    checkpoint: Checkpoint
    plan: Plan
    forward: Forward
    reading: Reading
    epsilon: float
    report: Progress
    batch_size: int | None = None
    shards: Shards | None = None
    smoother: Callable[[LayerView], Tensor] | None = None
    done: int = 0
    smallest_batch: int | None = None
    seconds: float = 0.0
    _collectors: list[Collector] = field(default_factory=list)
    _fits: int | None = None

    def run(self) -> None:
        """Measures every sequence. After an interruption `domains` still has what was done.

        Raises SinkscopeError: out of memory with one sequence; a layer that gives NaN or infinity.
        """
        for number, data in enumerate(self.reading.tokens):
            self._collectors.append(Collector(data.longest, self.smoother))
            self._run_domain(number, data, self._collectors[-1])

    def domains(self) -> list[Domain]:
        """What was measured so far, by domain."""
        domains = []
        for corpus, collector in zip(self.reading.corpora, self._collectors, strict=False):
            values = collector.values()
            if values:
                domains.append(Domain(corpus.domain, corpus.ids, corpus.documents, values))
        return domains

    def _run_domain(self, number: int, data: TokenData, collector: Collector) -> None:
        def receive(view: LayerView, row: int) -> None:
            collector.add(view)

        device = self.checkpoint.device
        capture = Capture(self.checkpoint.model, self.plan, receive, self.epsilon)
        start, finished = self.done, self._restore(number, collector)
        size = self._fits or self.batch_size or min(len(data.ids), chosen_batch(data.ids.shape[1], device))
        size = 1 if data.extras is not None else size
        self.done += finished
        self.report("scanning", self.done, self.reading.total)
        while finished < len(data.ids):
            self._note(size)
            began = time.perf_counter()
            try:
                parts = self._one_batch(capture, collector, next(batches(data, finished, size, device)))
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                if size == 1:
                    raise SinkscopeError(_what_would_fit(data.ids.shape[1])) from None
                self._fits = size = size // 2
                release_memory()
                continue
            if self.shards is not None:
                self.shards.write(number, finished, size, self._fits, parts)
            finished += min(size, len(data.ids) - finished)
            self.done = start + finished
            self.seconds += time.perf_counter() - began
            self.report("scanning", self.done, self.reading.total)

    def _restore(self, number: int, collector: Collector) -> int:
        """Takes a domain's batches from disk; returns their number of sequences."""
        finished = 0
        for shard in self.shards.read(number) if self.shards is not None else ():
            collector.restore(shard.parts)
            finished += shard.count
            self._fits = shard.fits
            self._note(shard.size)
        return finished

    def _note(self, size: int) -> None:
        self.smallest_batch = size if self.smallest_batch is None else min(size, self.smallest_batch)

    def _one_batch(self, capture: Capture, collector: Collector, batch: Batch) -> Parts:
        """Runs, keeps and returns one batch."""
        collector.begin()
        with capture.watching(batch.spans, batch.inputs.shape[1]):
            self.forward(batch.inputs, batch.mask, **batch.extra)
        bad = collector.bad_site(self.plan.sites)
        if bad is not None:
            raise SinkscopeError(_why_not_finite(self.checkpoint, bad.layer, bad.module))
        return collector.commit()


def chosen_batch(length: int, device: torch.device) -> int:
    """Sequences of `length` tokens that a pass takes where no --batch-size is given."""
    return max(1, (CPU_BATCH_TOKENS if device.type == "cpu" else DEVICE_BATCH_TOKENS) // length)


@contextmanager
def memory_needed(what: str) -> Iterator[None]:
    """Out of memory inside the block becomes one line that says what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise SinkscopeError(
            f"out of memory in {what}: try --dtype bfloat16, --device-map auto or another --device"
        ) from None


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    return isinstance(error, MemoryError) or should_reduce_batch_size(error)


def _what_would_fit(length: int) -> str:
    return (
        f"out of memory with one sequence of {length} tokens: try --seq-len {max(2, length // 2)}, --dtype bfloat16, "
        "or --device-map auto"
    )


def _why_not_finite(checkpoint: Checkpoint, layer: int, module: str) -> str:
    """The weights are finite (checked on loading): the dtype overflowed."""
    return (
        f"layer {layer} ({module}) gives NaN or infinity although all weights are finite: "
        f"{checkpoint.facts['dtype']} overflows; try --dtype float32"
    )
