"""Run `python docs/write_pages.py` after a column was changed: it rewrites docs/columns.md and docs/metrics.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from sinkscope.present.terminal.metrics import NOTATION, SYMBOLS, TITLES, anchor
from sinkscope.present.terminal.schema import SHOWN
from sinkscope.runs.catalogue import Column, catalogue
from sinkscope.runs.papers import NUMBER, cited_papers
from sinkscope.runs.schema.tables import ColumnSchema, TableSchema

HERE = Path(__file__).parent
WIDTH = 120

COLUMNS = """\
# Columns

[All pages](index.md)

`python docs/write_pages.py` writes this page from the schema that `sinkscope schema NAME` prints. Columns that identify
a row come first. A missing value is an empty cell in CSV and null in Parquet, never 0. A number that a table shows as a
mean over sequences has its standard error beside it, in the column `NAME_sem`; such columns are not listed here. The
name of a measured column leads to its [formula and source](metrics.md).
"""
METRICS = """\
# Metrics

[All pages](index.md)

`python docs/write_pages.py` writes this page from the docstrings of the functions that compute the columns;
`sinkscope metrics NAME` prints the same. The address of a definition is this page with `#NAME`, such as
[metrics.md#bos_mass](#bos_mass). "ours" marks what this project defined.

A value is computed for each sequence, over valid tokens only. The tables show its mean over sequences, and the standard
error in `NAME_sem`. Where "per" says run, the value is known for the whole run alone; where it says position, it is a
mean over the sequences that reach the position, without an error.

## Symbols

"""


def pages() -> dict[Path, str]:
    """The text of every page that is written from the source, by its path."""
    return {HERE / "columns.md": columns_page(), HERE / "metrics.md": metrics_page()}


def columns_page() -> str:
    """Every table with every column: type, unit, range, meaning."""
    return COLUMNS + "".join(_table(table) for table in SHOWN.values())


def _table(table: TableSchema) -> str:
    lines = ["", f"## {table.name}", "", f"`{table.file}`: a row is {table.row}.", ""]
    lines += ["| column | type, unit, range | meaning |", "|---|---|---|"]
    every = list(table.columns())
    names = {column.name for column in every}
    shown = [each for each in every if each.name.removesuffix("_sem") not in names - {each.name}]
    return "\n".join([*lines, *(_row(table, column) for column in _without_means(table, shown))]) + "\n"


def _without_means(table: TableSchema, columns: Iterable[ColumnSchema]) -> Iterator[ColumnSchema]:
    """In layers.csv the means over heads are one row: each has the unit and range of the column of heads.csv."""
    heads = {f"mean_{each.name}" for each in catalogue() if each.table == "heads"} if table.name == "layers" else set()
    yield from (column for column in columns if column.name not in heads)
    if heads:
        what = "Mean of the column NAME of heads.csv over the heads of the layer, for every column that has an error."
        yield ColumnSchema("mean_NAME", "number", "that of NAME", "that of NAME", what)


def _row(table: TableSchema, column: ColumnSchema) -> str:
    origin = next((each for each in _defined(table) if each.name == column.name), None)
    name = f"`{column.name}`" if origin is None else f"[`{column.name}`](metrics.md#{anchor(origin)})"
    facts = ", ".join(filter(None, (column.type, column.unit, column.range)))
    return f"| {name} | {_escaped(facts)} | {_escaped(column.what)} |"


def _defined(table: TableSchema) -> Iterator[Column]:
    """The columns of a table that docs/metrics.md defines; sequences.parquet holds those of heads and layers."""
    tables = (*TITLES,) if table.name == "sequences" else (*table.measured, table.name)
    yield from (each for each in catalogue() if each.shown and each.table in tables)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, within a table too."""
    return "".join(f"\\{letter}" if letter in r"\|*_[]<>`" else letter for letter in text)


def metrics_page() -> str:
    """Every measured column with its own heading, table by table."""
    symbols = "\n".join(_wrapped(f"- `{symbol}`: {what}.", "  ") for symbol, what in SYMBOLS.items())
    return METRICS + symbols + "\n" + "".join(_section(table, title) for table, title in TITLES.items())


def _section(table: str, title: str) -> str:
    columns = [column for column in catalogue() if column.table == table and column.shown]
    lines = ["", f"## {table}", "", _wrapped(_escaped(title) + ".")]
    if table in NOTATION:
        lines += ["", _wrapped(_escaped(NOTATION[table]))]
    return "\n".join([*lines, *map(_entry, columns)]) + "\n" if columns else ""


def _entry(column: Column) -> str:
    own = anchor(column) == column.name
    heading = column.name if own else f"{column.name} ({column.table})"
    facts = f"Unit: {column.unit}. Range: {column.range}. Per: {column.per}."
    source = f"Source: {_linked(column.source)}."
    return "\n".join(["", f"### {heading}", "", _wrapped(_escaped(column.formula)), "", _escaped(facts), "", source])


def _linked(source: str) -> str:
    """A source in which each arXiv number leads to the paper."""
    addresses = {paper.arxiv: paper.url for paper in cited_papers(source)}
    return NUMBER.sub(lambda found: f"[{found[0]}]({addresses[found[0]]})", source)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
