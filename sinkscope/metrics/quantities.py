"""The quantities that a scan measures. Each is one function, declared with the names of its result's axes.

The axes determine how its values are collected:
- `sequence` first: one row for each sequence; batches are concatenated.
- `element` first: any number of rows from each batch; batches are concatenated.
- a position (`key`, `query`, `early`) last: batches are summed, and a run holds the mean over the sequences that reach
  the position.
- `length` last: the function is called once for each prefix of the length curve.
- `metric` last: the columns of a table.
- `event`, `field`: any number of rows from each batch, each with the fields of EVENT_FIELDS; a row of sinks.parquet.
- `event`, `coordinate`: the same without a table; the first two coordinates are the sequence and the head.
- `head`: --tp spreads this axis over processes.
- `stretch`: stretches of positions, which `quantity_set` alone adds; see `stretches`.
A (sequence, head, position) quantity is a column of positions.parquet, and a (sequence, head, length) quantity a column
of length_curve.csv, unless it is declared internal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView, Missing
from sinkscope.errors import SinkscopeError, first_line
from sinkscope.metrics import stretches
from sinkscope.metrics.registry import METRICS, Metric, MetricSet, formula_of, registered

DIMS = (
    "sequence", "head", "metric", "length", "key", "query", "early", "channel", "element", "coordinate",
    "event", "field",
)  # fmt: skip
POSITIONS = ("key", "query", "early")
"""Axes whose size depends on the sequence length. `early` holds keys 0..63, over the first 64 queries."""

STRETCHED = ("sequence", "head", "stretch", "coordinate")
"""The axes of what is kept of a column of positions.parquet from position `stretches.EVERY` on."""
WHOLE = ("alpha",)
"""Columns of positions.parquet that are kept at every position all the same: heads.csv and the summary read them."""

UNSEEN = {"alpha": "unseen_keys", "early_alpha": "early_unseen_keys"}
"""Quantities by key that are NaN in a sequence in which no query may see the key, and the quantity that is 1 there.
Their mean at a position is over the other sequences."""

EVENT = ("event", "field")
"""The axes of a quantity whose values are events."""

EVENT_FIELDS = ("sequence", "head", "position", "alpha", "cos_first", "max_abs", "norm_ratio")
"""The fields of an event: its sequence in the view, its query head (NaN where no head is meant), its key position, and
what was measured there (NaN where it is missing). A run counts sequences in their domain, heads in their layer."""

PlaceTable = Literal["positions", "length_curve", "sinks"]
OWN_COLUMNS = ("domain", "stream", "layer", "head", "position", "length", "token")
"""Columns that these tables have in any case; no quantity may take their names."""


@dataclass(frozen=True)
class Quantity:
    """Something measured on every LayerView.

    Attributes:
        dims: names of the axes, from DIMS.
        compute: LayerView -> tensor with these axes; with a `length` axis, (LayerView, length) -> tensor without it.
            Raises Missing where the layer lacks what it needs.
        column: the column's name in the table, for events the kind of the row; None where no table shows the quantity.
    """

    name: str
    dims: tuple[str, ...]
    compute: Callable[..., Tensor]
    column: str | None = None
    unit: str = ""
    range: str = ""
    formula: str = ""
    source: str = ""

    @property
    def ships(self) -> bool:
        """Whether it is sinkscope's own."""
        return getattr(self.compute, "__module__", "sinkscope").partition(".")[0] in ("sinkscope", "functools")

    @property
    def of_events(self) -> bool:
        """Whether its values are events, whose first two fields are the sequence and the head."""
        return self.dims[0] == "event"

    @property
    def table(self) -> PlaceTable | None:
        """The table that shows the quantity; None where no table does."""
        return None if self.column is None else _table(self.dims)

    @property
    def summed(self) -> bool:
        """Whether batches are summed over their sequences, for a mean at each position."""
        return self.dims[-1] in POSITIONS

    @property
    def long(self) -> bool:
        """Whether it is a column of positions.parquet that long sequences have a stretch of."""
        return self.table == "positions" and self.dims[-1] != "early"

    def measure(self, view: LayerView, lengths: list[int]) -> Tensor | None:
        """The values of one view; None where they are missing.

        `lengths`: the prefixes of the length curve, none longer than the view's sequences. Raises SinkscopeError where
        the result's axes do not match the declared ones, and where a function that is not sinkscope's fails.
        """
        try:
            if self.dims[-1] != "length":
                values = self._checked(self.compute(view), view, self.dims)
                return stretches.before(values) if self.long and self.name not in WHOLE else values
            rest = self.dims[:-1]
            return torch.stack([self._checked(self.compute(view, n), view, rest) for n in lengths], -1)
        except Missing:
            return None
        except (SinkscopeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.ships or self.column is None:
                raise
            raise SinkscopeError(f"quantity {self.name} of {self.compute.__module__}: {first_line(error)}") from error

    def _checked(self, values: Tensor, view: LayerView, dims: tuple[str, ...]) -> Tensor:
        lengths = {"sequence": view.batch, "head": view.heads, "key": view.keys, "query": view.queries}
        lengths["field"] = len(EVENT_FIELDS)
        sizes = tuple(lengths.get(dim) for dim in dims)
        fits = len(values.shape) == len(dims) and all(
            size in (None, length) for size, length in zip(sizes, values.shape, strict=True)
        )
        if not fits:
            raise SinkscopeError(
                f"quantity {self.name}: the function returned a tensor of shape {list(values.shape)}; its axes "
                f"({', '.join(dims)}) need {[size or 'any' for size in sizes]}"
            )
        return values


QUANTITIES: dict[str, Quantity] = {}
"""Every declared quantity, by name. `quantity_set` adds those that hold the tables' metrics (`heads`, `layers`)."""


def quantity(
    *dims: str, unit: str, range: str, source: str = "ours", column: str | None = None, internal: bool = False
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Declares a function as a quantity with these axes. The function's name is the quantity's name, the first
    paragraph of its docstring the formula.

    `column`: the column's name, where it differs from the function's. `internal`: no table shows the quantity.
    Raises SinkscopeError for axes that cannot be joined, and for a name or column that is taken.
    """
    _refuse_bad_dims(dims)

    def declare(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        shown = None if internal or _table(dims) is None else column or compute.__name__
        made = Quantity(compute.__name__, dims, compute, shown, unit, range, formula_of(compute), source)
        _refuse_taken(made)
        QUANTITIES[made.name] = made
        return compute

    return declare


@dataclass(frozen=True)
class QuantitySet:
    """What one scan measures. A scan fixes its set before the first batch; later declarations do not change it.

    `metrics` names the columns of the quantities with a `metric` axis: `heads`, `layers`, and the tables of the
    measurements asked for. `lengths`: the prefixes asked for of quantities by length; None for 64, 128, 256, ...
    """

    metrics: MetricSet
    quantities: tuple[Quantity, ...]
    lengths: tuple[int, ...] | None = None

    def shown_in(self, table: PlaceTable) -> dict[str, Quantity]:
        """The quantities that a table shows, by column, in the order of the columns."""
        return {each.column: each for each in self.quantities if each.column is not None and each.table == table}

    def extended(self, quantities: Iterable[Quantity]) -> QuantitySet:
        """Returns this set with the quantities of measurements after its own."""
        return replace(self, quantities=(*self.quantities, *quantities))

    def asked(self, measures: Collection[str]) -> QuantitySet:
        """Returns this set without the metrics of measurements that are not in `measures`."""
        metrics = self.metrics.asked(measures)
        tables = {each.name: each for each in _always(metrics)}
        return replace(self, metrics=metrics, quantities=tuple(tables.get(each.name, each) for each in self.quantities))

    def axes(self) -> dict[str, list[str]]:
        """The axes of each quantity, by name; a `metric` or `field` axis is followed by the names of its columns.

        Shards are checked against this: the values of two scans can be joined where their axes are the same.
        """
        return {each.name: [*each.dims, *self._columns(each)] for each in self.quantities}

    def _columns(self, each: Quantity) -> tuple[str, ...]:
        if each.dims[-1] == "field":
            return EVENT_FIELDS
        return self.metrics.names(each.name) if each.dims[-1] == "metric" else ()


def quantity_set(metrics: MetricSet | None = None, lengths: tuple[int, ...] | None = None) -> QuantitySet:
    """A snapshot of the quantities declared now. `metrics` are those of the scan; None takes sinkscope's own."""
    metrics = registered().asked(()) if metrics is None else metrics
    long = [each for each in QUANTITIES.values() if each.long]
    beyond = (Quantity(stretches.name(each), STRETCHED, partial(stretches.of_quantity, each)) for each in long)
    return QuantitySet(metrics, (*_always(metrics), *QUANTITIES.values(), *beyond), lengths)


def _always(metrics: MetricSet) -> tuple[Quantity, Quantity]:
    """The quantities that hold the metrics of every scan's tables, heads and layers."""
    layers = Quantity("layers", ("sequence", "metric"), partial(_layer_columns, metrics.tables["layers"]))
    return table_by_head("heads", metrics), layers


def table_by_head(table: str, metrics: MetricSet) -> Quantity:
    """The quantity that holds a table's metrics, each a function LayerView -> [sequence, head]."""
    return Quantity(table, ("sequence", "head", "metric"), partial(_head_columns, metrics.tables[table]))


def _head_columns(metrics: Mapping[str, Metric], view: LayerView) -> Tensor:
    return _columns(metrics, view, view.attention.first[..., 0])


def _layer_columns(metrics: Mapping[str, Metric], view: LayerView) -> Tensor:
    return _columns(metrics, view, view.attention.first[:, 0, 0])


def _columns(metrics: Mapping[str, Metric], view: LayerView, like: Tensor) -> Tensor:
    """Every metric of a table, as [*like, metric]; NaN for a metric that is missing or sampled."""
    missing = torch.full_like(as_widest(like), torch.nan)
    columns = []
    for metric in metrics.values():
        try:
            columns.append(missing if metric.sampled else _fitting(metric.compute(view), metric, like))
        except Missing:
            columns.append(missing)
    return _side_by_side(columns)


def _side_by_side(columns: list[Tensor]) -> Tensor:
    """Columns of any types, widened and stacked along a last axis. Each type is widened at once, since a GPU takes as
    long to start on one column as on a hundred."""
    places: dict[torch.dtype, list[int]] = defaultdict(list)
    for place, column in enumerate(columns):
        places[column.dtype].append(place)
    wide: dict[int, Tensor] = {}
    for alike in places.values():
        wide |= zip(alike, as_widest(torch.stack([columns[place] for place in alike])), strict=True)
    return torch.stack([wide[place] for place in range(len(columns))], -1)


def _fitting(values: object, metric: Metric, like: Tensor) -> Tensor:
    """The values of a metric. Raises TypeError where they are no real numbers, one for each of `like`."""
    if isinstance(values, Tensor) and values.shape == like.shape and not values.is_complex():
        return values
    kind = type(values).__name__
    returned = f"a tensor {list(values.shape)} of {values.dtype}" if isinstance(values, Tensor) else kind
    raise TypeError(f"{metric.name} returned {returned}; real numbers {list(like.shape)} are needed")


def _table(dims: tuple[str, ...]) -> PlaceTable | None:
    if dims == EVENT:
        return "sinks"
    if dims[:-1] != ("sequence", "head"):
        return None
    if dims[-1] in POSITIONS:
        return "positions"
    return "length_curve" if dims[-1] == "length" else None


def _refuse_bad_dims(dims: tuple[str, ...]) -> None:
    unknown = [dim for dim in dims if dim not in DIMS]
    if unknown or not dims:
        raise SinkscopeError(f"axes {dims}: at least one is needed, each one of {', '.join(DIMS)}")
    if {"event", "field"} & {*dims} and dims not in (EVENT, ("event", "coordinate")):
        raise SinkscopeError(f"axes {dims}: event and field stand together and alone, or event with coordinate")
    if dims[0] not in ("sequence", "element", "event"):
        raise SinkscopeError(f"axes {dims}: the first must be sequence, element or event, along which batches join")
    early = [dim for dim in dims[:-1] if dim in (*POSITIONS, "length", "metric")]
    if early or dims[-1] == "metric":
        raise SinkscopeError(f"axes {dims}: key, query, early and length can only be last; metric is for the tables")


def _refuse_taken(made: Quantity) -> None:
    if made.name in QUANTITIES or made.name in METRICS:
        raise SinkscopeError(f"quantity {made.name!r} is declared already; give the function another name")
    others = [each.column for each in QUANTITIES.values() if each.table == made.table]
    if made.column is not None and made.column in (*others, *OWN_COLUMNS):
        raise SinkscopeError(f"quantity {made.name!r}: {made.table} has a column {made.column!r} already")
