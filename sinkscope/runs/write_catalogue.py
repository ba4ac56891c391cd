"""`python -m sinkscope.runs.write_catalogue` writes data/columns.json anew, after a column was added or changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from sinkscope.metrics import Metric, registered
from sinkscope.metrics.registry import TABLES
from sinkscope.runs.catalogue import Column
from sinkscope.runs.columns import RUN_COLUMNS, RunColumn

FILE = Path(__file__).parents[1] / "data" / "columns.json"


def catalogue_text() -> str:
    """The file as the declarations have it: a JSON list, one column a line.

    A place such as max_abs_token stands twice: as a value of each sequence, and as the run's own.
    """
    lines = []
    for table in TABLES:
        declared: list[Metric | RunColumn] = [*registered().tables[table].values(), *RUN_COLUMNS[table].values()]
        lines += [json.dumps(asdict(_described(column)), ensure_ascii=False) for column in declared]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _described(column: Metric | RunColumn) -> Column:
    facts = (column.name, column.table, column.unit, column.range, column.formula, column.source)
    return (
        Column(*facts, shown=column.shown, sampled=column.sampled)
        if isinstance(column, Metric)
        else Column(*facts, per="run")
    )


if __name__ == "__main__":
    FILE.write_text(catalogue_text(), encoding="utf-8")
