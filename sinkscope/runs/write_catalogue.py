"""Run `python -m sinkscope.runs.write_catalogue` after adding or changing a column: it rewrites data/columns.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from sinkscope.metrics import METRICS, Metric
from sinkscope.metrics.quantities import EVENT, PlaceTable, Quantity, quantity_set
from sinkscope.metrics.registry import ALWAYS
from sinkscope.runs.catalogue import Column
from sinkscope.runs.columns import RUN_COLUMNS, RunColumn
from sinkscope.runs.schema.measures import MEASURES
from sinkscope.runs.schema.sink_tables import SINK_COLUMNS, TOKEN_COLUMNS

FILE = Path(__file__).parents[1] / "data" / "columns.json"


def catalogue_text() -> str:
    """The text of the file: a JSON list of the declared columns, one per line.

    A position such as max_abs_token is listed twice: as a per-sequence value and as a value of the run.
    """
    for name in MEASURES:
        import_module(f"sinkscope.runs.{name}")
    lines = []
    for table in dict.fromkeys([*METRICS, *RUN_COLUMNS]):
        declared: list[Metric | RunColumn] = [*METRICS.get(table, {}).values(), *RUN_COLUMNS[table].values()]
        lines += [_line(_described(column)) for column in declared]
    lines += [_line(_of_quantity(each)) for each in _shown()]
    lines += [_line(each) for each in _of_sinks()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _line(column: Column) -> str:
    """A measurement is named only where a table of every scan has a column on request."""
    facts = asdict(column)
    if column.measure is None:
        del facts["measure"]
    return json.dumps(facts, ensure_ascii=False)


def _shown() -> list[Quantity]:
    """The quantities that a table shows, table by table."""
    tables: tuple[PlaceTable, ...] = ("positions", "length_curve", "sinks")
    return [each for table in tables for each in quantity_set().shown_in(table).values()]


def _of_quantity(each: Quantity) -> Column:
    per = "kind" if each.dims == EVENT else "position" if each.summed else "sequence"
    return Column(str(each.column), str(each.table), each.unit, each.range, each.formula, each.source, per=per)


def _of_sinks() -> list[Column]:
    """The measured columns of sinks.parquet and tokens.csv."""
    tables = (("sinks", "sink", SINK_COLUMNS), ("tokens", "token", TOKEN_COLUMNS))
    return [
        Column(each.name, table, each.unit, each.range, each.formula, "ours", per=per)
        for table, per, columns in tables
        for each in columns
        if each.unit
    ]


def _described(column: Metric | RunColumn) -> Column:
    facts = (column.name, column.table, column.unit, column.range, column.formula, column.source)
    return (
        Column(*facts, shown=column.shown, sampled=column.sampled, measure=_on_request(column))
        if isinstance(column, Metric)
        else Column(*facts, per="run")
    )


def _on_request(column: Metric) -> str | None:
    return column.measure if column.table in ALWAYS else None


if __name__ == "__main__":
    FILE.write_text(catalogue_text(), encoding="utf-8")
