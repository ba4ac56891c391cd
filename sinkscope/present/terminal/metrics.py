"""The list of columns and the list of examples, as text."""

from __future__ import annotations

import textwrap
from typing import Any

from sinkscope.errors import SinkscopeError

TITLES = {
    "heads": "heads.csv: one row per (stream, layer, head)",
    "layers": "layers.csv: one row per (stream, layer); also mean_NAME of every column of heads.csv",
    "smoothing": "smoothing.csv (scan --smoothing): one row per (stream, layer, head)",
}
MEANS = (
    "Columns are means over sequences of per-sequence values, each with its standard error in NAME_sem,\n"
    "unless marked (run): those are known for the run as a whole only."
)
WIDTH = 100


def metric_list(names: list[str]) -> list[dict[str, Any]]:
    """Every column, or those named. Raises SinkscopeError for a name that is no column."""
    # The run columns of the tables register themselves when their module is read.
    import sinkscope.runs.columns
    import sinkscope.runs.smoothing  # noqa: F401
    from sinkscope.metrics import RunColumn
    from sinkscope.metrics import columns as columns_of
    from sinkscope.metrics.registry import TABLES

    shown: list[dict[str, Any]] = [
        {
            "name": name,
            "table": table,
            "unit": column.unit,
            "range": column.range,
            "formula": column.formula,
            "source": column.source,
            "per": "run" if isinstance(column, RunColumn) else "sequence",
        }
        for table in TABLES
        for name, column in columns_of(table).items()
        if isinstance(column, RunColumn) or column.shown
    ]
    known = {column["name"] for column in shown}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SinkscopeError(f"no column {unknown[0]!r}; `sinkscope metrics` lists them all")
    return [column for column in shown if not names or column["name"] in names]


def render_metrics(columns: list[dict[str, Any]]) -> str:
    """One entry a column: name, range and unit, formula, source."""
    lines = []
    for table, title in TITLES.items():
        own = [column for column in columns if column["table"] == table]
        if not own:
            continue
        lines += [title, ""]
        for column in own:
            mark = " (run)" if column["per"] == "run" else ""
            lines.append(f"  {column['name']}{mark}: {column['unit']}, {column['range']}")
            for text in (column["formula"], f"Source: {column['source']}"):
                lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join([*lines, MEANS, ""])


def render_examples() -> str:
    """Name, what it is, licence, and how to install what is absent."""
    from sinkscope.checkpoints.examples import EXAMPLES

    lines = []
    for example in EXAMPLES.values():
        state = "installed" if example.installed else f"not installed: {example.install}"
        lines += [
            f"example:{example.name}",
            f"    {example.what}",
            f"    licence: {example.licence}",
            f"    {state}",
            "",
        ]
    return "\n".join(lines)
