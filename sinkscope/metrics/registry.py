"""How a metric is declared: what computes it, its unit, range, formula and source; and the set of metrics of one scan.

To add a metric, write one function LayerView -> tensor and put `@head_metric` or `@layer_metric` above it. Its name
is the column's name, the docstring's first paragraph its formula. A decorator changes nothing but the function: it
hangs the declaration on it. A function counts once it is in a MetricSet: the built-in ones through `register`, in this
package's `__init__`; a user's through `scan(..., metrics=[mine])`, `--metrics FILE.py` or an entry point.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from sinkscope.capture.view import LayerView
    from sinkscope.metrics.spectra import SpectrumEntropy

    Compute = Callable[[LayerView], Tensor]
    Begin = Callable[[LayerView], SpectrumEntropy]


Table = Literal["heads", "layers", "smoothing"]
TABLES: tuple[Table, ...] = ("heads", "layers", "smoothing")

LN = "divided by its mean over the heads of the same layer, in the same sequence"

DECLARED = "sinkscope_metrics"
"""The attribute of a decorated function that holds its declarations."""


@dataclass(frozen=True)
class Metric:
    """A column whose value is known for each sequence; the tables show its mean over sequences and `<name>_sem`.

    Attributes:
        table: `heads` ([sequence, head] values), `layers` ([sequence] values) or `smoothing` ([head] values of one
            sequence: `compute` takes a FoldedHeads).
        shown: whether the tables carry it (places such as max_abs_token are per-sequence only).
        sampled: a layer metric too slow for every sequence: a scan measures it on the first sequences of each domain
            (option --spectra); the others are empty.
        begin: starts what `compute` does without waiting for it; the result's `tensor()` gives the values of `compute`.
    """

    name: str
    table: Table
    unit: str
    range: str
    formula: str
    source: str
    compute: Callable[..., Any]
    shown: bool = True
    sampled: bool = False
    begin: Begin | None = None


@dataclass(frozen=True)
class MetricSet:
    """The per-sequence metrics of one scan, by table and name. A scan takes it once, before its first batch, and
    nothing changes it afterwards."""

    tables: Mapping[Table, Mapping[str, Metric]]

    def names(self, table: Table) -> tuple[str, ...]:
        """The columns of a table, in its order."""
        return tuple(self.tables[table])

    def extended(self, metrics: Iterable[Metric]) -> MetricSet:
        """A set with these metrics behind its own. Names are checked by `sinkscope.metrics.extension`, before."""
        tables = {table: dict(self.tables[table]) for table in TABLES}
        for metric in metrics:
            tables[metric.table][metric.name] = metric
        return MetricSet(tables)


METRICS: dict[Table, dict[str, Metric]] = {table: {} for table in TABLES}
"""The metrics that come with sinkscope."""


def register(family: ModuleType) -> None:
    """Adds the metrics of a module of this package, in the order they stand in. Raises SinkscopeError: a name twice."""
    for value in vars(family).values():
        for metric in declared(value):
            if METRICS[metric.table].setdefault(metric.name, metric) is not metric:
                raise SinkscopeError(f"metric {metric.name}: {family.__name__} declares it a second time")


def registered() -> MetricSet:
    """The metrics that come with sinkscope."""
    return MetricSet({table: dict(METRICS[table]) for table in TABLES})


def declared(function: object) -> tuple[Metric, ...]:
    """The metrics that a function was decorated as: none, one, or two where it is `normalised`."""
    return getattr(function, DECLARED, ()) if callable(function) else ()


def head_metric(
    *, unit: str, range: str, source: str = "ours", normalised: bool = False
) -> Callable[[Compute], Compute]:
    """Makes a function LayerView -> [sequence, head] a metric of heads: a column of heads.csv.

    Args:
        unit: what the values are counted in (probability, nats, norm, ...); probability and share are drawn from 0 to
            1. range: the values it can take, as text. source: the paper or repository it is from.
        normalised: adds the column `<name>_ln`: the value over its mean over the layer's heads, in the same sequence.

    The function's name is the column's name, its docstring's first paragraph the column's formula. It may raise
    Missing where a layer lacks what it needs. Raises SinkscopeError where there is no docstring.
    """

    def declare(compute: Compute) -> Compute:
        metric = _describe(compute, "heads", unit, range, source)
        name, text = f"{metric.name}_ln", f"{metric.name} {LN}"
        ln = Metric(name, "heads", "ratio", "[0, heads]", text, source, over_layer(compute))
        return _declare(compute, metric, ln) if normalised else _declare(compute, metric)

    return declare


def layer_metric(
    *, unit: str, range: str, source: str = "ours", shown: bool = True, sampled: bool = False,
    begin: Begin | None = None,
) -> Callable[[Compute], Compute]:  # fmt: skip
    """Makes a function LayerView -> [sequence] a metric of layers: a column of layers.csv.

    Args:
        unit, range, source: as of `head_metric`.
        shown: False keeps it out of layers.csv; sequences.parquet has it all the same.
        sampled: it is dear, and measured on the first sequences of a domain only. Under --tp the main process alone
            calls it, so it must not ask for `layer_mean`.
        begin: see Metric.

    Raises SinkscopeError where there is no docstring.
    """

    def declare(compute: Compute) -> Compute:
        metric = _describe(compute, "layers", unit, range, source, shown)
        return _declare(compute, replace(metric, sampled=sampled, begin=begin))

    return declare


def smoothing_metric(*, unit: str, range: str, source: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Makes a function FoldedHeads -> [head] a column of smoothing.csv."""
    return lambda compute: _declare(compute, _describe(compute, "smoothing", unit, range, source))


def over_layer(compute: Compute) -> Compute:
    """The `_ln` form of a head metric: divided by its mean over the heads of the layer, per sequence."""

    @wraps(compute)
    def normalised(view: LayerView) -> Tensor:
        values = compute(view)
        return values / view.layer_mean(values)

    return normalised


def formula_of(function: Callable[..., object]) -> str:
    """The first paragraph of the docstring on one line. Raises SinkscopeError where there is none."""
    text = inspect.getdoc(function)
    if not text:
        raise SinkscopeError(
            f"metric {function.__name__} has no docstring: its first paragraph is the column's formula"
        )
    return " ".join(text.split("\n\n")[0].split())


def _describe(
    compute: Callable[..., Any], table: Table, unit: str, range: str, source: str, shown: bool = True
) -> Metric:
    return Metric(compute.__name__, table, unit, range, formula_of(compute), source, compute, shown)


F = TypeVar("F", bound=Callable[..., Any])


def _declare(compute: F, *metrics: Metric) -> F:
    setattr(compute, DECLARED, metrics)
    return compute
