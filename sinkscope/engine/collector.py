"""What one batch gave: every quantity of every attention call, collected call by call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from torch import Tensor

from sinkscope.capture import LayerView, Site
from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.precision import float64
from sinkscope.engine.sampling import Sampler
from sinkscope.metrics.quantities import QuantitySet, quantity_set


@dataclass
class Part:
    """What one LayerView gave.

    Attributes:
        count: sequences.
        causal, queries, keys: as the attention call was.
        values: tensors by the name of the quantity, with its axes; what is missing is left out. They lie on their
            device until the batch is committed, then on the CPU; what joins by sums is then summed over the sequences,
            a sequence axis of size 1.
    """

    count: int
    causal: bool
    queries: int
    keys: int
    values: dict[str, Tensor]


Parts = dict[str, list[Part]]
"""What one batch gave, by the name of the site."""


class Collector:
    """Takes LayerViews batch by batch; a batch that failed half-way leaves no trace (begin, add..., commit).

    `length`: T of the longest sequence, which fixes the prefixes of the length curve. `quantities`: what is measured;
    None = what is declared now. `sampled`: sequences that sampled metrics are measured on; None = as many as are cheap.
    """

    def __init__(self, length: int, quantities: QuantitySet | None = None, sampled: int | None = None) -> None:
        self._lengths = prefixes(length)
        self._quantities = quantity_set() if quantities is None else quantities
        self._sampler = Sampler(self._quantities.metrics.tables["layers"], length, sampled)
        self._start = 0
        self._batch: Parts = {}

    def begin(self, start: int = 0) -> None:
        """`start`: number of the batch's first sequence in its domain."""
        self.drop()
        self._batch, self._start = defaultdict(list), start

    def add(self, view: LayerView, row: int = 0) -> None:
        """`row`: the batch's row that the view begins at."""
        measured = {each.name: each.measure(view, self._lengths) for each in self._quantities.quantities}
        values = {name: value for name, value in measured.items() if value is not None}
        self._sampler.add(view, self._start + row, values["layers"])
        self._batch[view.site.name].append(Part(view.batch, view.attention.causal, view.queries, view.keys, values))

    def drop(self) -> None:
        """Cancels what is still to be computed; called when the batch fails."""
        self._sampler.drop()

    def commit(self) -> Parts:
        """Moves the finished batch to the CPU and returns it."""
        self._sampler.settle()
        ready = {name: [_to_cpu(part, self._quantities) for part in parts] for name, parts in self._batch.items()}
        self._batch = {}
        return ready

    def bad_site(self, sites: list[Site]) -> Site | None:
        """The first site of the batch under way whose numbers are NaN or infinite where they never may be."""
        metrics = self._quantities.metrics
        mass, peak = metrics.names("heads").index("sink_score"), metrics.names("layers").index("inf_norm")
        for site in sites:
            for part in self._batch.get(site.name, []):
                seen = "first_unit" in part.values  # the residual stream
                checked = [part.values["heads"][..., mass], *([part.values["layers"][..., peak]] if seen else [])]
                if not all(values.isfinite().all() for values in checked):
                    return site
        return None


def prefixes(queries: int) -> list[int]:
    """Lengths of the length curve: 64, 128, 256, ... and T itself; T alone where T < 64."""
    lengths = []
    length = EARLY
    while length < queries:
        lengths.append(length)
        length *= 2
    return [*lengths, queries]


def _to_cpu(part: Part, quantities: QuantitySet) -> Part:
    summed = {each.name for each in quantities.quantities if each.summed}
    return replace(
        part, values={name: _summed(own) if name in summed else own.cpu() for name, own in part.values.items()}
    )


def _summed(values: Tensor) -> Tensor:
    """Sum over the sequences of a batch, [1, ...] float64 on the CPU."""
    return float64(values).sum(0, keepdim=True).cpu()
