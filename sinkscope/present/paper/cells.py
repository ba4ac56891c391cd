"""The cells of a paper's table as text: a mean with the half width of its interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    pass
from sinkscope.runs.paper_table import Column, PaperTable


def decimals(table: PaperTable, column: Column) -> int:
    """Decimals of a column: two significant digits of the median half width; three significant of means without."""
    values = table.frame[column.name]
    if values.dtype == object or not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        return 0
    numbers = values.dropna().astype(float)
    if column.interval:
        half = (table.frame[f"{column.name}_high"] - numbers).dropna()
        half = half[half > 0]
        if len(half):
            return int(min(6, max(0, 1 - math.floor(math.log10(float(half.median()))))))
    if (numbers == numbers.round()).all():
        return 0
    top = float(numbers.abs().max())
    return int(min(6, max(0, 2 - math.floor(math.log10(top))))) if top > 0 else 0


@dataclass(frozen=True)
class Writing:
    """How a format writes a cell: `escape` for any text, `missing` for no value, `between` mean and half width."""

    escape: Callable[[str], str]
    missing: str
    between: str


def written_rows(table: PaperTable, writing: Writing) -> list[list[str]]:
    """Every cell as text: the keys, then `mean ± half width` of the 95 % interval, each column with its decimals."""
    places = [decimals(table, column) for column in table.columns]
    return [
        [writing.escape(str(row[key])) for key in table.keys]
        + [_written(row, column, place, writing) for column, place in zip(table.columns, places, strict=True)]
        for row in table.frame.to_dict("records")
    ]


def _written(row: dict[Any, Any], column: Column, place: int, writing: Writing) -> str:
    value = row[column.name]
    if pd.isna(value):
        return writing.missing
    if isinstance(value, str | bool):
        return writing.escape(str(value))
    text = f"{float(value):.{place}f}"
    if column.interval and not pd.isna(row[f"{column.name}_high"]):
        text += f"{writing.between}{float(row[f'{column.name}_high'] - value):.{place}f}"
    return text
