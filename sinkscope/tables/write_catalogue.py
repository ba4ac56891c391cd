"""Run `python -m sinkscope.tables.write_catalogue` after adding or changing a column.

It rewrites data/columns.json and the columns.json of every question, those of installed packages among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from sinkscope.metrics import METRICS, Metric
from sinkscope.metrics.quantities import EVENT, PlaceTable, Quantity, quantity_set
from sinkscope.metrics.registry import ALWAYS, register
from sinkscope.runs.questions import QUESTIONS, Question
from sinkscope.runs.schema.table import Column
from sinkscope.runs.schema.tables import SINK_COLUMNS, TOKEN_COLUMNS
from sinkscope.tables.columns import RUN_COLUMNS

FILE = Path(__file__).parents[1] / "data" / "columns.json"


def catalogue_texts() -> dict[Path, str]:
    """The text of each file: a JSON list of declared columns, one per line.

    A position such as max_abs_token is listed twice: as a per-sequence value and as a value of the run.
    """
    always = [_line(column) for table in ALWAYS for column in _of_table(table, METRICS)]
    always += [_line(_of_quantity(quantity)) for quantity in _shown()]
    always += [_line(column) for column in _of_sinks()]
    texts = {FILE: _listed(always)}
    for question in QUESTIONS.values():
        lines = [_line(column) for column in _of_question(question)]
        texts |= {question.folder / "columns.json": _listed(lines)} if lines else {}
    return texts


def _of_question(question: Question) -> list[Column]:
    """The columns of its own tables, and those that it adds to tables of every scan."""
    tables: dict[str, dict[str, Metric]] = {}
    family = question.part("columns")
    if family is not None:
        register(family, tables)
    question.part("tables")
    names = [table.name for table in question.tables]
    return [column for table in dict.fromkeys([*names, *tables]) for column in _of_table(table, tables, table in names)]


def _of_table(table: str, metrics: Mapping[str, Mapping[str, Metric]], whole: bool = True) -> list[Column]:
    """`whole`: with the columns of the whole run."""
    run = RUN_COLUMNS.get(table, {}).values() if whole else ()
    return [_described(column) for column in (*metrics.get(table, {}).values(), *run)]


def _listed(lines: list[str]) -> str:
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _line(column: Column) -> str:
    """A measurement is named only where a table of every scan has a column on request, an end where one is dormant, a
    place where the map of heads offers the column."""
    facts = asdict(column)
    for name in ("measure", "dormant", "map_place"):
        if facts[name] is None:
            del facts[name]
    return json.dumps(facts, ensure_ascii=False)


def _shown() -> list[Quantity]:
    """The quantities that a table shows, table by table."""
    tables: tuple[PlaceTable, ...] = ("positions", "length_curve", "sinks")
    return [quantity for table in tables for quantity in quantity_set().shown_in(table).values()]


def _of_quantity(quantity: Quantity) -> Column:
    per = "kind" if quantity.dims == EVENT else "position" if quantity.summed else "sequence"
    return Column(
        str(quantity.column),
        str(quantity.table),
        quantity.unit,
        quantity.range,
        quantity.formula,
        quantity.source,
        per=per,
    )


def _of_sinks() -> list[Column]:
    """The measured columns of sinks.parquet and tokens.csv."""
    tables = (("sinks", "sink", SINK_COLUMNS), ("tokens", "token", TOKEN_COLUMNS))
    return [
        Column(column.name, table, column.unit, column.range, column.what, "ours", per=per)
        for table, per, columns in tables
        for column in columns
        if column.unit
    ]


def _described(metric: Metric) -> Column:
    facts = {field.name: getattr(metric, field.name) for field in fields(Column)}
    return Column(**facts | {"measure": metric.measure if metric.table in ALWAYS else None})


if __name__ == "__main__":
    for file, text in catalogue_texts().items():
        file.write_text(text, encoding="utf-8")
