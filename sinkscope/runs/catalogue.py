"""The definition of every column, read without importing torch: data/columns.json, and the metrics of a run's user.

`python -m sinkscope.runs.write_catalogue` writes that file from the declarations, whose modules import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.runs.schema.manifest import Manifest


@dataclass(frozen=True)
class Column:
    """The definition of one column.

    Attributes:
        table: `heads`, `layers`, `positions`, `length_curve`, `sinks`, `tokens`, or a table of a measurement such as
            `smoothing`.
        per: `sequence` (the table shows a mean over sequences and its standard error), `position` (a mean over the
            sequences that reach the position, without an error), `run` (one value for the whole run), `sink` and
            `token` (one value a row of sinks.parquet, of tokens.csv) or `kind` (a kind of row of sinks.parquet, no
            column).
        shown: whether the table has the column, and not only the per-sequence values.
        sampled: whether it is measured on the first sequences of each domain only.
        measure: the measurement that adds the column to a table of every scan; None for all other columns.
    """

    name: str
    table: str
    unit: str
    range: str
    formula: str
    source: str
    per: str = "sequence"
    shown: bool = True
    sampled: bool = False
    measure: str | None = None


PER = ("sequence", "run")


@cache
def catalogue() -> tuple[Column, ...]:
    """Every column that comes with sinkscope, in the order of the tables."""
    text = (files("sinkscope") / "data" / "columns.json").read_text("utf-8")
    return tuple(Column(**entry) for entry in json.loads(text))


def columns_of(manifest: Manifest | None) -> Iterator[Column]:
    """The columns that come with sinkscope, then those of the metrics that the run's user added."""
    yield from catalogue()
    for name, facts in () if manifest is None else manifest.metrics.items():
        yield Column(name, **facts.model_dump(exclude={"code_sha256"}))


def find_column(manifest: Manifest, name: str, *tables: str) -> Column | None:
    """The column of this name in the first of the tables that has it; None where none has."""
    found = {each.table: each for each in columns_of(manifest) if each.name == name}
    return next((found[table] for table in tables if table in found), None)


def elsewhere(manifest: Manifest, name: str) -> str:
    """` (it is a column of smoothing)`, for a name that a table other than the one at hand has; empty for any other."""
    tables = dict.fromkeys(each.table for each in columns_of(manifest) if each.name == name and each.shown)
    return f" (it is a column of {' and '.join(tables)})" if tables else ""


def per_sequence(table: str) -> frozenset[str]:
    """Names of a table's columns that are means over sequences; a position such as max_abs_token is not."""
    names = {per: {each.name for each in catalogue() if (each.table, each.per) == (table, per)} for per in PER}
    return frozenset(names["sequence"] - names["run"])
