"""Collects every quantity of every attention call of a batch, call by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sinkscope.capture import LayerView, Missing, Site
from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.precision import as_float64, as_widest
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import TokenData
from sinkscope.metrics import stretches
from sinkscope.metrics.quantities import POSITIONS, STRETCHED, UNSEEN, QuantitySet, quantity_set
from sinkscope.metrics.registry import Metric
from sinkscope.metrics.spectra import WAITING_BYTES, SpectrumEntropy, cheap_spectra, crowded, full, solve
from sinkscope.metrics.stretches import over_sequences


@dataclass
class Part:
    """The quantities of one LayerView.

    Attributes:
        count: number of sequences.
        causal, queries, keys: those of the attention call.
        values: tensors by the name of the quantity, with its axes; a missing quantity has no entry. `commit` moves them
            to the CPU, and joins those of a summed quantity and of stretches over the sequences, which leaves a
            sequence axis of size 1.
    """

    count: int
    causal: bool
    queries: int
    keys: int
    values: dict[str, Tensor]


Parts = dict[str, list[Part]]
"""The parts of one batch, by the name of the site."""


class Collector:
    """Takes LayerViews batch by batch: begin, add for each view, commit. A batch that fails half-way leaves no trace.

    `length`: T of the longest sequence. `quantities`: what to measure; None = what is declared now. `sampled`: number
    of sequences for sampled metrics; None = as many as are cheap. `unfinished`: takes what sampled metrics leave to be
    computed later; None = nothing: `commit` waits for it.
    """

    def __init__(
        self, length: int, quantities: QuantitySet | None = None, sampled: int | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:  # fmt: skip
        self._quantities = quantity_set() if quantities is None else quantities
        self._sampler = Sampler(self._quantities.metrics.tables["layers"], length, sampled, unfinished)
        self._start = 0
        self._batch: Parts = {}

    def begin(self, start: int = 0) -> None:
        """Begins a batch. `start`: number of its first sequence in its domain."""
        self.drop()
        self._batch, self._start = defaultdict(list), start

    def add(self, view: LayerView, row: int = 0) -> None:
        """Measures a view. `row`: the batch's row that it begins at."""
        view.sampled = self._sampler.count(view, self._start + row)
        lengths = prefixes(view.queries, self._quantities.lengths)
        measured = {quantity.name: quantity.measure(view, lengths) for quantity in self._quantities.quantities}
        values = {name: value for name, value in measured.items() if value is not None}
        self._sampler.add(view, values["layers"])
        self._batch[view.site.name].append(Part(view.batch, view.attention.causal, view.queries, view.keys, values))

    def drop(self) -> None:
        """Cancels the unfinished sampled metrics of the batch; called when the batch fails."""
        self._sampler.drop()

    def commit(self) -> Parts:
        """Moves the finished batch to the CPU and returns it."""
        self._sampler.settle()
        ready = {name: [_to_cpu(part, self._quantities) for part in parts] for name, parts in self._batch.items()}
        self._batch = {}
        return ready

    def bad_site(self, sites: list[Site]) -> Site | None:
        """Returns the first site of the batch with NaN or infinity in a column that never may hold them; else None."""
        metrics = self._quantities.metrics
        mass, peak = metrics.names("heads").index("sink_score"), metrics.names("layers").index("inf_norm")
        for site in sites:
            for part in self._batch.get(site.name, []):
                has_stream = "first_unit" in part.values  # else inf_norm of the residual stream is missing
                checked = [part.values["heads"][..., mass], *([part.values["layers"][..., peak]] if has_stream else [])]
                if not all(values.isfinite().all() for values in checked):
                    return site
        return None


def prefixes(queries: int, asked: tuple[int, ...] | None = None) -> list[int]:
    """Lengths of the length curve of an attention call: those asked for below T, its number of queries, else 64, 128,
    256, ...; then T itself."""
    if asked is not None:
        return [*(length for length in asked if length < queries), queries]
    lengths = []
    length = EARLY
    while length < queries:
        lengths.append(length)
        length *= 2
    return [*lengths, queries]


def check_lengths(asked: tuple[int, ...] | None, tokens: Sequence[TokenData]) -> None:
    """Raises SinkscopeError for a prefix that is longer than the longest sequence."""
    longest = max(data.longest for data in tokens)
    if asked and asked[-1] > longest:
        raise SinkscopeError(f"--lengths {asked[-1]}: the longest sequence has {longest} tokens; see --seq-len")


def _to_cpu(part: Part, quantities: QuantitySet) -> Part:
    dims = {quantity.name: quantity.dims for quantity in quantities.quantities}
    values = {name: value.nan_to_num(0.0) if name in UNSEEN else value for name, value in part.values.items()}
    return replace(part, values={name: _over_batch(dims[name], value).cpu() for name, value in values.items()})


def _over_batch(dims: tuple[str, ...], values: Tensor) -> Tensor:
    """Returns what is kept of a batch: for a quantity by position the sum over its sequences, [1, ...] float64.

    By head, a long sequence has hundreds of megabytes of them: such sums are kept in float32, exact for one sequence.
    """
    if dims == STRETCHED:
        return over_sequences(values)
    if dims[-1] not in POSITIONS:
        return values
    total = as_float64(values).sum(0, keepdim=True)
    return total.float() if "head" in dims and total.shape[-1] > stretches.EVERY else total


# Sampled metrics: layer metrics too slow for every sequence, measured on the first sequences of each domain.
#
# A metric that can begin its work and leave it to threads (matrix_entropy) is waited for only when the batch is
# committed, so that the forward pass goes on meanwhile. A watch, whose program has no use for it, waits until the run
# is asked for.


@dataclass(frozen=True)
class _Begun:
    """Work under way; its values belong at the start of `column`, [sequence]."""

    work: SpectrumEntropy
    column: Tensor

    def finish(self) -> None:
        _put(self.work.tensor(), self.column)


class Unfinished:
    """Sampled values of finished batches that are still to be computed, as long as their matrices take little memory.

    Until then they are NaN in the parts that `Collector.commit` returned.
    """

    def __init__(self) -> None:
        self._begun: list[_Begun] = []
        self._bytes = 0

    def take(self, begun: _Begun) -> None:
        """Takes over work whose values are on the CPU."""
        self._begun.append(begun)
        self._bytes += begun.work.bytes_held
        if self._bytes >= WAITING_BYTES:
            self.finish()

    def finish(self) -> None:
        """Computes them all, in the parts that hold them. What an interruption leaves is computed at the next call."""
        solve([task.work for task in self._begun])
        for task in self._begun:
            task.finish()
        self.drop()

    def drop(self) -> None:
        """Forgets them: nobody wants them any more."""
        self._begun, self._bytes = [], 0


class Sampler:
    """Measures the sampled layer metrics of one domain.

    `longest`: length of its longest sequence in tokens. `count`: sequences to measure; None = as many as are cheap.
    `unfinished`: as in Collector.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], longest: int, count: int | None, unfinished: Unfinished | None = None
    ) -> None:
        self._sampled = [(place, metric) for place, metric in enumerate(metrics.values()) if metric.sampled]
        self._longest, self._count = longest, count
        self._unfinished = unfinished
        self._begun: list[_Begun] = []

    def count(self, view: LayerView, number: int) -> int:
        """How many first sequences of a view to measure; its first sequence has this `number` in its domain."""
        return max(0, min(view.batch, self._wanted(view) - number))

    def add(self, view: LayerView, layers: Tensor) -> None:
        """Begins the sampled metrics of a view's first `LayerView.sampled` sequences.

        The values go to `layers`, [sequence, metric], at the latest when `settle` returns, or when what it left
        unfinished is finished.
        """
        if not view.sampled:
            return
        sampled = view.rows(view.sampled)
        for place, metric in self._sampled:
            self._measure(metric, sampled, layers[:, place])
        waiting = [task.work for task in self._begun]
        if (full if self._unfinished is None else crowded)(waiting):
            solve(waiting)

    def _measure(self, metric: Metric, view: LayerView, column: Tensor) -> None:
        try:
            if metric.begin is None:
                _put(metric.compute(view), column)
            else:
                self._begun.append(_Begun(metric.begin(view), column))
        except Missing:
            return  # the column stays NaN

    def _wanted(self, view: LayerView) -> int:
        """Sequences of the domain to measure in this layer."""
        if self._count is not None:
            return self._count
        shape = (view.queries, view.queries) if view.residual_in is None else view.residual_in.shape[1:]
        return cheap_spectra(max(shape[0], self._longest), shape[1])

    def drop(self) -> None:
        """Cancels the work under way; called when the batch fails."""
        for task in self._begun:
            task.work.cancel()
        self._begun = []

    def settle(self) -> None:
        """Waits for the work under way, but for what can be left unfinished: the values of an accelerator are copied
        with the batch."""
        begun, self._begun = self._begun, []
        for task in begun:
            if self._unfinished is not None and task.work.bytes_held:
                self._unfinished.take(task)
            else:
                task.finish()


def _put(values: Tensor, column: Tensor) -> None:
    column[: len(values)] = as_widest(values)
