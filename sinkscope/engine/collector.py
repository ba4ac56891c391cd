"""What one batch gave: every metric of every head for every sequence, collected layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture import LayerView, Missing, Site
from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.precision import float64, wide
from sinkscope.metrics.mass import alpha, early_alpha
from sinkscope.metrics.registry import MetricSet, Table, registered
from sinkscope.metrics.residual import massive_elements
from sinkscope.metrics.spectra import SpectrumEntropy, full, solve


@dataclass
class Part:
    """What one LayerView gave: on its device until the batch is committed."""

    heads: Tensor
    layers: Tensor
    curve: Tensor
    alpha: Tensor
    early: Tensor | None
    first_unit: Tensor | None
    causal: bool
    queries: int
    keys: int
    first: Tensor
    first_share: Tensor
    massive: Tensor | None = None
    smoothing: Tensor | None = None


Value = Tensor | SpectrumEntropy

Parts = dict[str, list[Part]]
"""What one batch gave, by the name of the site."""


class Collector:
    """Takes LayerViews batch by batch; a batch that failed half-way leaves no trace (begin, add..., commit).

    `length`: T of the longest sequence, which fixes the prefixes of the length curve. `smoother`: measures the
    smoothing table too, [sequence, head, metric]. `spectra`: see LayerView.
    """

    def __init__(
        self,
        length: int,
        smoother: Callable[[LayerView], Tensor] | None = None,
        spectra: int | None = None,
        metrics: MetricSet | None = None,
    ) -> None:
        self._prefixes = prefixes(length)
        self._smoother = smoother
        self._spectra = spectra
        self._metrics = registered() if metrics is None else metrics
        self._start = 0
        self._batch: Parts = {}
        self._later: list[tuple[Part, list[Value | None]]] = []

    def begin(self, start: int = 0) -> None:
        """`start`: number of the batch's first sequence in its domain."""
        self.drop()
        self._batch, self._later, self._start = defaultdict(list), [], start

    def add(self, view: LayerView, row: int = 0) -> None:
        """`row`: the batch's row that the view begins at."""
        view.number, view.longest, view.spectra = self._start + row, self._prefixes[-1], self._spectra
        columns = _columns(view, self._metrics, "layers")
        part = _reduce(view, self._prefixes, self._metrics)
        self._later.append((part, columns))
        waiting = [each for _, own in self._later for each in own if isinstance(each, SpectrumEntropy)]
        if full(waiting):
            solve(waiting)
        if self._smoother is not None:
            part.smoothing = self._smoother(view)
        self._batch[view.site.name].append(part)

    def drop(self) -> None:
        """Stops what is still to be computed of a batch that nobody will commit."""
        for _, columns in self._later:
            for column in columns:
                if isinstance(column, SpectrumEntropy):
                    column.cancel()
        self._later = []

    def settle(self) -> None:
        """Computes what is still to be computed."""
        for part, columns in self._later:
            part.layers = _stacked(columns, part.first[:, 0, 0])
        self._later = []

    def commit(self) -> Parts:
        """Moves the finished batch to the CPU and returns it."""
        self.settle()
        ready = {name: [_to_cpu(part) for part in parts] for name, parts in self._batch.items()}
        self._batch = {}
        return ready

    def bad_site(self, sites: list[Site]) -> Site | None:
        """The first site of the batch under way whose numbers are NaN or infinite where they never may be."""
        self.settle()
        mass, peak = self._metrics.names("heads").index("sink_score"), self._metrics.names("layers").index("inf_norm")
        for site in sites:
            for part in self._batch.get(site.name, []):
                seen = part.first_unit is not None
                if not part.heads[..., mass].isfinite().all() or (seen and not part.layers[..., peak].isfinite().all()):
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


def _reduce(view: LayerView, lengths: list[int], metrics: MetricSet) -> Part:
    first = view.attention.first
    curve = [_curve_point(first, length) for length in lengths]
    unit = None
    if view.residual_in is not None:
        unit = torch.nn.functional.normalize(view.residual_in[:, 0].float(), dim=-1)
    return Part(
        heads=_stacked(_columns(view, metrics, "heads"), first[..., 0]),
        layers=first.new_empty(0),  # `Collector.settle` puts them here
        curve=torch.stack(curve, -2),
        alpha=alpha(view),
        early=early_alpha(view),
        first_unit=unit,
        causal=view.attention.causal,
        queries=view.queries,
        keys=view.keys,
        first=first,
        first_share=view.attention.first_share,
        massive=None if view.residual_in is None else massive_elements(view)[:, 1:],
    )


def _curve_point(first: Tensor, length: int) -> Tensor:
    """(bos_mass, sink_score) of the first `length` queries, [B, H, 2]; NaN where the sequence is shorter."""
    if length > first.shape[-1]:
        return torch.full((*first.shape[:2], 2), torch.nan, device=first.device, dtype=first.dtype)
    return torch.stack([first[..., 1:length].mean(-1), first[..., :length].mean(-1)], -1)


def _columns(view: LayerView, metrics: MetricSet, table: Table) -> list[Value | None]:
    """Every metric of a table on one view; None where the layer lacks what it needs."""
    columns: list[Value | None] = []
    for metric in metrics.tables[table].values():
        try:
            columns.append(metric.compute(view))
        except Missing:
            columns.append(None)
    return columns


def _stacked(columns: list[Value | None], like: Tensor) -> Tensor:
    """[B, H, metric] or [B, metric], wide, each column expanded to `like`; NaN for what is missing."""
    tensors = [column.tensor() if isinstance(column, SpectrumEntropy) else column for column in columns]
    missing = torch.full_like(wide(like), torch.nan)
    return torch.stack([missing if one is None else wide(one).expand_as(like) for one in tensors], -1)


def _to_cpu(part: Part) -> Part:
    return Part(
        heads=part.heads.cpu().double(),
        layers=part.layers.cpu().double(),
        curve=part.curve.cpu(),
        alpha=_summed(part.alpha),
        early=None if part.early is None else _summed(part.early),
        first_unit=None if part.first_unit is None else part.first_unit.cpu(),
        causal=part.causal,
        queries=part.queries,
        keys=part.keys,
        first=_summed(part.first),
        first_share=_summed(part.first_share),
        massive=None if part.massive is None else part.massive.cpu(),
        smoothing=part.smoothing,
    )


def _summed(values: Tensor) -> Tensor:
    """Sum over the sequences of a batch, [1, ...] float64 on the CPU."""
    return float64(values).sum(0, keepdim=True).cpu()
