"""What every column means, read without torch: the catalogue data/columns.json, and the columns a run adds itself.

`python -m sinkscope.runs.write_catalogue` writes the file from the declarations, which import torch.
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
        table: `heads`, `layers` or `smoothing`. per: `sequence` (a mean over sequences, with its standard error) or
            `run` (known for the run as a whole only). shown: whether the table itself carries it.
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


PER = ("sequence", "run")


@cache
def catalogue() -> tuple[Column, ...]:
    """Every column that comes with sinkscope, in the order of the tables."""
    text = (files("sinkscope") / "data" / "columns.json").read_text("utf-8")
    return tuple(Column(**entry) for entry in json.loads(text))


def columns_of(manifest: Manifest | None) -> Iterator[Column]:
    """The catalogue, then the columns of the metrics that the run's user brought."""
    yield from catalogue()
    for name, own in () if manifest is None else manifest.metrics.items():
        yield Column(name, **own.model_dump(exclude={"code_sha256"}))


def find_column(manifest: Manifest, name: str, *tables: str) -> Column | None:
    """The column of this name in the first of the tables that has it."""
    found = {each.table: each for each in columns_of(manifest) if each.name == name}
    return next((found[table] for table in tables if table in found), None)


def per_sequence(table: str) -> frozenset[str]:
    """Names of a table's columns that are means over sequences; a place such as max_abs_token is none."""
    names = {per: {each.name for each in catalogue() if (each.table, each.per) == (table, per)} for per in PER}
    return frozenset(names["sequence"] - names["run"])
