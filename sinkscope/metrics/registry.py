"""How a metric is declared (its function, unit, range, formula and source), and the set of metrics of one scan.

To add a metric, write one function LayerView -> tensor and put `@head_metric` or `@layer_metric` above it. The
function's name is the column's name, the first paragraph of its docstring is the formula. The decorator only attaches
the declaration to the function. A scan computes a metric once it is in the scan's MetricSet: a built-in metric enters
through `register`, in this package's `__init__`; a user's metric through `scan(..., metrics=[mine])`,
`--metrics FILE.py` or an entry point.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.schema.table import Column

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from sinkscope.capture.view import LayerView
    from sinkscope.metrics.spectra import SpectrumEntropy

    Compute = Callable[[LayerView], Tensor]
    Begin = Callable[[LayerView], SpectrumEntropy]


Table = str
"""`heads`, `layers`, or a table that a measurement writes on request, such as `smoothing`."""
ALWAYS: tuple[Table, ...] = ("heads", "layers")
"""The tables that every scan has."""

LN = "divided by its mean over the heads of the same layer, in the same sequence."

DECLARED = "sinkscope_metrics"
"""The attribute of a decorated function that holds its declarations."""


@dataclass(frozen=True, kw_only=True)
class Metric(Column):
    """A column and the function that computes it. Where it is `per` sequence, the tables show the mean over sequences
    and `<name>_sem`; where it is `per` run, `compute` takes the values of the whole run.

    Attributes:
        compute: for `heads`, LayerView -> [sequence, head]; for `layers`, LayerView -> [sequence]. What it takes and
            returns in a table that a measurement writes on request is the measurement's own matter.
        shown: as in Column. Positions such as max_abs_token are kept per sequence only.
        sampled: True for a metric too slow for every sequence: a scan measures it on the first sequences of each
            domain (option --spectra) and leaves it empty for the others.
        begin: starts the work of `compute` without waiting for it; the result's `tensor()` returns the same values.
        measure: the measurement (`--measure NAME`) that has to be asked for; None for a metric of every scan.
        dormant: as in Column. `ablate` and `arms` choose heads from that end.
        map_place: as in Column. The map offers every metric that is not sinkscope's own.
    """

    compute: Callable[..., Any]
    begin: Begin | None = None


@dataclass(frozen=True)
class MetricSet:
    """The per-sequence metrics of one scan, by table and name. A scan fixes its set before the first batch; later
    declarations do not change it."""

    tables: Mapping[Table, Mapping[str, Metric]]

    def names(self, table: Table) -> tuple[str, ...]:
        """The metrics of a table, in the order of its columns."""
        return tuple(self.tables.get(table, ()))

    def asked(self, measures: Collection[str]) -> MetricSet:
        """Returns a set without the metrics of measurements that are not in `measures`."""
        kept = {
            table: {
                name: metric for name, metric in columns.items() if metric.measure is None or metric.measure in measures
            }
            for table, columns in self.tables.items()
        }
        return MetricSet({table: columns for table, columns in kept.items() if columns or table in ALWAYS})

    def without(self, names: Collection[str]) -> MetricSet:
        """Returns a set without the metrics of these names."""
        return MetricSet({
            table: {name: each for name, each in own.items() if name not in names} for table, own in self.tables.items()
        })  # fmt: skip

    def extended(self, metrics: Iterable[Metric]) -> MetricSet:
        """Returns a set with these metrics after its own. The caller has checked their names
        (`sinkscope.metrics.extension`)."""
        tables = {table: dict(columns) for table, columns in self.tables.items()}
        for metric in metrics:
            tables[metric.table][metric.name] = metric
        return MetricSet(tables)


METRICS: dict[Table, dict[str, Metric]] = {table: {} for table in ALWAYS}
"""The metrics of every scan."""


def register(family: ModuleType, tables: dict[Table, dict[str, Metric]] = METRICS) -> None:
    """Adds the metrics of a module, in the module's order. Raises SinkscopeError for a duplicate name."""
    for value in vars(family).values():
        for metric in declared(value):
            if tables.setdefault(metric.table, {}).setdefault(metric.name, metric) is not metric:
                raise SinkscopeError(f"metric {metric.name}: {family.__name__} declares it a second time")


def registered(shipped: bool = False) -> MetricSet:
    """The metrics of every scan and of every question; `shipped`: only of questions that come with sinkscope."""
    tables = {table: dict(columns) for table, columns in METRICS.items()}
    for name in QUESTIONS:
        family = _columns_of(name)
        if family is not None and (QUESTIONS.ships(name) or not shipped):
            register(family, tables)
    return MetricSet(tables)


def _columns_of(name: str) -> ModuleType | None:
    """The module of a question's columns; None where it has none. That of another package that does not load is left
    out with a warning: a scan that asks something else needs none of its columns."""
    try:
        return QUESTIONS[name].part("columns")
    except SinkscopeError as error:
        if QUESTIONS.ships(name):
            raise
        _warn_once(f"{error}; its columns are left out")
        return None


@cache
def _warn_once(words: str) -> None:
    warnings.warn(words, stacklevel=3)


def declared(function: object) -> tuple[Metric, ...]:
    """The metrics that a function declares: none, one, or two where it is `normalised`."""
    return getattr(function, DECLARED, ()) if callable(function) else ()


def head_metric(
    *,
    unit: str,
    range: str,
    source: str = "ours",
    normalised: bool = False,
    dormant: str | None = None,
    map_place: int | None = None,
) -> Callable[[Compute], Compute]:
    """Declares a function LayerView -> [sequence, head] as a head metric: a column of heads.csv.

    Args:
        unit: the unit of the values (probability, nats, norm, ...); figures draw probability and share from 0 to 1.
        range: the values it can take, as text.
        source: the paper or repository that the metric comes from.
        normalised: adds the column `<name>_ln`: the value divided by its mean over the heads of the same layer, in the
            same sequence.
        dormant: see Metric.
        map_place: see Metric; where `normalised`, it is that of `<name>_ln`.

    The function's name is the column's name, the first paragraph of its docstring is the column's formula. The function
    may raise Missing where a layer lacks what it needs. Raises SinkscopeError where there is no docstring, and for a
    unit, range or source that is no text.
    """

    def declare(compute: Compute) -> Compute:
        metric = replace(metric_of(compute, "heads", unit, range, source), dormant=dormant)
        name, text = f"{metric.name}_ln", f"{metric.name} {LN}"
        ln = Metric(
            name, "heads", "ratio", "[0, H]", text, source, compute=over_layer(compute), dormant=dormant,
            map_place=map_place,
        )  # fmt: skip
        return _declare(compute, metric, ln) if normalised else _declare(compute, replace(metric, map_place=map_place))

    return declare


def layer_metric(
    *, unit: str, range: str, source: str = "ours", shown: bool = True, sampled: bool = False,
    begin: Begin | None = None, measure: str | None = None,
) -> Callable[[Compute], Compute]:  # fmt: skip
    """Declares a function LayerView -> [sequence] as a layer metric: a column of layers.csv.

    Args:
        unit, range, source: as in `head_metric`.
        shown: False keeps it out of layers.csv; sequences.parquet still holds it.
        sampled: True for a slow metric, which is then measured on the first sequences of each domain only. Under --tp
            only the main process calls it, so it must not use `layer_mean`.
        begin, measure: see Metric.

    Raises SinkscopeError as `head_metric` does.
    """

    def declare(compute: Compute) -> Compute:
        metric = metric_of(compute, "layers", unit, range, source)
        return _declare(compute, replace(metric, shown=shown, sampled=sampled, begin=begin, measure=measure))

    return declare


def measured_metric(
    table: Table,
    *,
    unit: str,
    range: str,
    source: str = "ours",
    measure: str | None = None,
    sampled: bool = False,
    dormant: str | None = None,
    map_place: int | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Declares a function as a column with one value for each sequence, in a table that a measurement writes.

    The measurement decides what the function takes and returns, and leaves a `sampled` column empty from sequence
    `LayerView.sampled` on. `measure`: its name; None = the table's name. `dormant`, `map_place`: see Metric.
    """

    def declare(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        metric = metric_of(compute, table, unit, range, source)
        metric = replace(metric, measure=measure or table, sampled=sampled, dormant=dormant, map_place=map_place)
        return _declare(compute, metric)

    return declare


def over_layer(compute: Compute) -> Compute:
    """Returns the `_ln` form of a head metric: its value divided by the layer's mean over heads, per sequence."""

    @wraps(compute)
    def normalised(view: LayerView) -> Tensor:
        values = compute(view)
        return values / view.layer_mean(values)

    return normalised


def formula_of(function: Callable[..., object]) -> str:
    """The first paragraph of the function's docstring, on one line. Raises SinkscopeError where there is none."""
    text = inspect.getdoc(function)
    if not text and sys.flags.optimize > 1:
        raise SinkscopeError(
            "Python left out the docstrings, which hold the formulas of the columns: start it without -OO and "
            "PYTHONOPTIMIZE=2"
        )
    if not text:
        raise SinkscopeError(
            f"metric {function.__name__} has no docstring: its first paragraph is the column's formula"
        )
    return " ".join(text.split("\n\n")[0].split())


def metric_of(compute: Callable[..., Any], table: Table, unit: str, range: str, source: str = "ours") -> Metric:
    """The metric that a function is: its name is the column's, its docstring's first paragraph the formula. Raises
    SinkscopeError where there is no docstring, and for a unit, range or source that is no text."""
    for what, value in (("unit", unit), ("range", range), ("source", source)):
        if not isinstance(value, str):
            raise SinkscopeError(f"metric {compute.__name__}: its {what} is {value!r}; a text is needed")
    return Metric(compute.__name__, table, unit, range, formula_of(compute), source, compute=compute)


F = TypeVar("F", bound=Callable[..., Any])


def _declare(compute: F, *metrics: Metric) -> F:
    setattr(compute, DECLARED, metrics)
    return compute
