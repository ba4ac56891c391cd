"""Columns and cells as papers write them: a column in mathematics, a mean with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sinkscope.present.numbers import decimals, is_missing
from sinkscope.runs.paper_table import PaperColumn, PaperTable
from sinkscope.runs.words import FIRST_MASS

MATHEMATICS = {
    "sink_score": r"$\alpha_0$",
    "entropy": "$H$",
    "honor": "HONOR",
    "cos_first_residual": r"$\cos(x_0, x_j)$",
    "norm_ratio": r"$\|x_0\| / \|x_j\|$",
    "norm_first": r"$\|x_0\|$",
    "norm_other": r"$\|x_j\|$",
    "inf_norm": r"$\|x\|_\infty$",
    "max_abs": r"$\max |x|$",
}
"""By column; a layer's mean of a head metric is written as the metric is."""


def mathematics(name: str) -> str | None:
    """The column as mathematics; None where papers write it in words."""
    return MATHEMATICS.get(name.removeprefix("mean_"))


def in_words(name: str, first_mass: str) -> str:
    """The column's name in words, not escaped. `first_mass`: what attention on the first token is called in the run
    (`sinkscope.runs.words.first_mass`)."""
    return first_mass if name.removeprefix("mean_") == FIRST_MASS else name.replace("_", " ")


# The cells of a paper's table as text: a mean with its standard error, as on every screen.


MOST = 12
"""Most decimals of a cell: an error that they do not show is rounding, of values in single precision."""


def is_number(table: PaperTable, name: str) -> bool:
    """Whether a column of the table's frame holds numbers; booleans do not count."""
    values = table.frame[name]
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def errors(table: PaperTable, column: PaperColumn) -> pd.Series:
    """The standard error of each row; empty for a column without errors."""
    if not column.interval:
        return pd.Series(dtype=float)
    return table.frame[f"{column.name}_sem"].dropna()


def places(table: PaperTable, column: PaperColumn) -> int:
    """Decimals of a column's cells; 0 where they are words."""
    return decimals(table.frame[column.name], errors(table, column)) if is_number(table, column.name) else 0


def places_of(error: float, place: int) -> int:
    """Decimals of one cell: the column's `place`, or as many as its error needs not to read 0; an error of 0, or below
    what MOST decimals show, stays 0."""
    enough = (more for more in range(place, MOST + 1) if float(f"{error:.{more}f}") > 0)
    return next(enough, place)


@dataclass(frozen=True)
class Writing:
    """How a format writes cells: `escape` makes any text safe, `missing` stands for no value, `between` joins mean and
    error, and `infinite` takes the sign of a ratio over 0."""

    escape: Callable[[str], str]
    missing: str
    between: str
    infinite: str = "{}inf"


def written_rows(table: PaperTable, writing: Writing) -> list[list[str]]:
    """Every cell as text: the keys, then `mean ± standard error`, each column with its decimals."""
    decimals_of = [places(table, column) for column in table.columns]
    return [
        [writing.escape(str(row[key])) for key in table.keys]
        + [_written(row, column, place, writing) for column, place in zip(table.columns, decimals_of, strict=True)]
        for row in table.frame.to_dict("records")
    ]


def _written(row: dict[Any, Any], column: PaperColumn, place: int, writing: Writing) -> str:
    value = row[column.name]
    if is_missing(value):
        return writing.missing
    if isinstance(value, str | bool):
        return writing.escape(str(value))
    if math.isinf(value):
        return writing.infinite.format("-" if value < 0 else "")
    error = float(row[f"{column.name}_sem"]) if column.interval else math.nan
    if math.isnan(error):
        return f"{float(value):.{place}f}"
    digits = places_of(error, place)
    return f"{float(value):.{digits}f}{writing.between}{error:.{digits}f}"
