"""Sampled metrics: layer metrics too slow for every sequence, measured on the first sequences of each domain.

A metric that can begin its work and leave it to threads (matrix_entropy) is waited for only when the batch is
committed, so that the forward pass goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sinkscope.capture import LayerView, Missing
from sinkscope.capture.precision import as_widest
from sinkscope.metrics.registry import Metric
from sinkscope.metrics.spectra import SpectrumEntropy, cheap_spectra, full, solve


@dataclass(frozen=True)
class _Begun:
    """Work under way; its values belong at the start of `column`, [sequence]."""

    work: SpectrumEntropy
    column: Tensor

    def finish(self) -> None:
        _put(self.work.tensor(), self.column)


class Sampler:
    """Measures the sampled layer metrics of one domain.

    `longest`: length of its longest sequence in tokens. `count`: sequences to measure; None = as many as are cheap.
    """

    def __init__(self, metrics: Mapping[str, Metric], longest: int, count: int | None) -> None:
        self._sampled = [(place, metric) for place, metric in enumerate(metrics.values()) if metric.sampled]
        self._longest, self._count = longest, count
        self._begun: list[_Begun] = []

    def count(self, view: LayerView, number: int) -> int:
        """How many first sequences of a view to measure; its first sequence has this `number` in its domain."""
        return max(0, min(view.batch, self._wanted(view) - number))

    def add(self, view: LayerView, layers: Tensor) -> None:
        """Begins the sampled metrics of a view's first `LayerView.sampled` sequences.

        The values go to `layers`, [sequence, metric], at the latest when `settle` returns.
        """
        if not view.sampled:
            return
        sampled = view.rows(view.sampled)
        for place, metric in self._sampled:
            self._measure(metric, sampled, layers[:, place])
        waiting = [each.work for each in self._begun]
        if full(waiting):
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
        for each in self._begun:
            each.work.cancel()
        self._begun = []

    def settle(self) -> None:
        """Waits for the work under way."""
        for each in self._begun:
            each.finish()
        self._begun = []


def _put(values: Tensor, column: Tensor) -> None:
    column[: len(values)] = as_widest(values)
