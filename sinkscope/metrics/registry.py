"""One list of every column: what computes it, its unit, range, formula and source. Tables, CSV, docs read this list.

To add a metric, write one function LayerView -> tensor in the file of its family and put `@head_metric` or
`@layer_metric` above it. Its name is the column's name, the docstring's first paragraph its formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from sinkscope.capture.view import LayerView
    from sinkscope.metrics.spectra import SpectrumEntropy

    Compute = Callable[[LayerView], Tensor]
    LayerCompute = TypeVar("LayerCompute", bound=Callable[[LayerView], Tensor | SpectrumEntropy])


Table = Literal["heads", "layers", "smoothing"]
TABLES: tuple[Table, ...] = ("heads", "layers", "smoothing")

LN = "divided by its mean over the heads of the same layer, in the same sequence"


@dataclass(frozen=True)
class Metric:
    """A column whose value is known for each sequence; the tables show its mean over sequences and `<name>_sem`.

    Attributes:
        table: `heads` ([sequence, head] values), `layers` ([sequence] values) or `smoothing` ([head] values of one
            sequence: `compute` takes a FoldedHeads).
        shown: whether the tables carry it (places such as max_abs_token are per-sequence only).
    """

    name: str
    table: Table
    unit: str
    range: str
    formula: str
    source: str
    compute: Callable[..., Any]
    shown: bool = True


@dataclass(frozen=True)
class RunColumn:
    """A column known for the whole run only (a maximum over sequences, a rule): no standard error.

    The value is derived in `sinkscope.run_columns` (or `sinkscope.smoothing`); it is declared beside its function.
    """

    name: str
    table: Table
    unit: str
    range: str
    formula: str
    source: str
    compute: Callable[..., object]


METRICS: dict[Table, dict[str, Metric]] = {table: {} for table in TABLES}
RUN_COLUMNS: dict[Table, dict[str, RunColumn]] = {table: {} for table in TABLES}


@dataclass(frozen=True)
class MetricSet:
    """The per-sequence metrics of one scan, by table and name. A scan takes it once, before its first batch, so that a
    metric registered later changes nothing in it."""

    tables: Mapping[Table, Mapping[str, Metric]]

    def names(self, table: Table) -> tuple[str, ...]:
        """The columns of a table, in its order."""
        return tuple(self.tables[table])


def registered() -> MetricSet:
    """A snapshot of the metrics that are registered now."""
    return MetricSet({table: dict(METRICS[table]) for table in TABLES})


def columns(table: Table) -> dict[str, Metric | RunColumn]:
    """Every column of a table, in its order: per-sequence metrics first, then those of the whole run."""
    return {**METRICS[table], **RUN_COLUMNS[table]}


def head_metric(
    *, unit: str, range: str, source: str = "ours", normalised: bool = False
) -> Callable[[Compute], Compute]:
    """Registers a function LayerView -> [batch, head]. `normalised` adds `<name>_ln`, the layer-normalised column."""

    def register(compute: Compute) -> Compute:
        metric = _describe(compute, "heads", unit, range, source)
        METRICS["heads"][metric.name] = metric
        if normalised:
            name = f"{metric.name}_ln"
            METRICS["heads"][name] = Metric(
                name, "heads", "ratio", "[0, heads]", f"{metric.name} {LN}", source, over_layer(compute)
            )
        return compute

    return register


def layer_metric(
    *, unit: str, range: str, source: str = "ours", shown: bool = True
) -> Callable[[LayerCompute], LayerCompute]:
    """Registers a function LayerView -> [batch]."""

    def register(compute: LayerCompute) -> LayerCompute:
        metric = _describe(compute, "layers", unit, range, source, shown)
        METRICS["layers"][metric.name] = metric
        return compute

    return register


def smoothing_metric(*, unit: str, range: str, source: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a function FoldedHeads -> [head]."""

    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        metric = _describe(compute, "smoothing", unit, range, source)
        METRICS["smoothing"][metric.name] = metric
        return compute

    return register


def run_column(table: Table, *, unit: str, range: str, source: str = "ours") -> Callable[..., Callable[..., object]]:
    """Registers a function of the whole run's values; see `sinkscope.run_columns`."""

    def register(compute: Callable[..., object]) -> Callable[..., object]:
        name, formula = compute.__name__, _formula(compute)
        RUN_COLUMNS[table][name] = RunColumn(name, table, unit, range, formula, source, compute)
        return compute

    return register


def over_layer(compute: Compute) -> Compute:
    """The `_ln` form of a head metric: divided by its mean over the heads of the layer, per sequence."""

    def normalised(view: LayerView) -> Tensor:
        values = compute(view)
        return values / view.layer_mean(values)

    return normalised


def _describe(
    compute: Callable[..., Any], table: Table, unit: str, range: str, source: str, shown: bool = True
) -> Metric:
    return Metric(compute.__name__, table, unit, range, _formula(compute), source, compute, shown)


def _formula(function: Callable[..., object]) -> str:
    text = inspect.getdoc(function)
    if not text:
        raise TypeError(f"{function.__name__} needs a docstring: its first paragraph is the column's formula")
    return " ".join(text.split("\n\n")[0].split())
