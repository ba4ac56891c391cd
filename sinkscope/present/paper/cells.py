"""The cells of a paper's table as text: a mean with the half width of its interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sinkscope.present.numbers import decimals, is_missing
from sinkscope.runs.paper_table import Column, PaperTable


def is_number(table: PaperTable, name: str) -> bool:
    """Whether a column of the table's frame holds numbers; booleans do not count."""
    values = table.frame[name]
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def half_widths(table: PaperTable, column: Column) -> pd.Series:
    """Half the width of each row's 95 % interval; empty for a column without intervals."""
    if not column.interval:
        return pd.Series(dtype=float)
    return (table.frame[f"{column.name}_high"] - table.frame[column.name]).dropna()


def places(table: PaperTable, column: Column) -> int:
    """Decimals of a column's cells; 0 where they are words."""
    return decimals(table.frame[column.name], half_widths(table, column)) if is_number(table, column.name) else 0


@dataclass(frozen=True)
class Writing:
    """How a format writes cells: `escape` makes any text safe, `missing` stands for no value, `between` joins mean and
    half width."""

    escape: Callable[[str], str]
    missing: str
    between: str


def written_rows(table: PaperTable, writing: Writing) -> list[list[str]]:
    """Every cell as text: the keys, then `mean ± half width` of the 95 % interval, each column with its decimals."""
    decimals_of = [places(table, column) for column in table.columns]
    return [
        [writing.escape(str(row[key])) for key in table.keys]
        + [_written(row, column, place, writing) for column, place in zip(table.columns, decimals_of, strict=True)]
        for row in table.frame.to_dict("records")
    ]


def _written(row: dict[Any, Any], column: Column, place: int, writing: Writing) -> str:
    value = row[column.name]
    if is_missing(value):
        return writing.missing
    if isinstance(value, str | bool):
        return writing.escape(str(value))
    text = f"{float(value):.{place}f}"
    if column.interval and not is_missing(row[f"{column.name}_high"]):
        text += f"{writing.between}{float(row[f'{column.name}_high'] - value):.{place}f}"
    return text
