"""Run `python -m sinkscope.runs.write_catalogue` after adding or changing a column: it rewrites data/columns.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from sinkscope.metrics import Metric, registered
from sinkscope.metrics.quantities import PlaceTable, Quantity, quantity_set
from sinkscope.metrics.registry import TABLES
from sinkscope.runs.catalogue import Column
from sinkscope.runs.columns import RUN_COLUMNS, RunColumn

FILE = Path(__file__).parents[1] / "data" / "columns.json"


def catalogue_text() -> str:
    """The text of the file: a JSON list of the declared columns, one per line.

    A position such as max_abs_token is listed twice: as a per-sequence value and as a value of the run.
    """
    lines = []
    for table in TABLES:
        declared: list[Metric | RunColumn] = [*registered().tables[table].values(), *RUN_COLUMNS[table].values()]
        lines += [json.dumps(asdict(_described(column)), ensure_ascii=False) for column in declared]
    lines += [json.dumps(asdict(_of_quantity(each)), ensure_ascii=False) for each in _shown()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _shown() -> list[Quantity]:
    """The quantities that a table shows, table by table."""
    tables: tuple[PlaceTable, ...] = ("positions", "length_curve")
    return [each for table in tables for each in quantity_set().shown_in(table).values()]


def _of_quantity(each: Quantity) -> Column:
    per = "position" if each.summed else "sequence"
    return Column(str(each.column), str(each.table), each.unit, each.range, each.formula, each.source, per=per)


def _described(column: Metric | RunColumn) -> Column:
    facts = (column.name, column.table, column.unit, column.range, column.formula, column.source)
    return (
        Column(*facts, shown=column.shown, sampled=column.sampled)
        if isinstance(column, Metric)
        else Column(*facts, per="run")
    )


if __name__ == "__main__":
    FILE.write_text(catalogue_text(), encoding="utf-8")
