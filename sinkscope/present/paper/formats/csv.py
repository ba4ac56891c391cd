"""A paper's table as CSV: every column of its frame, nine significant digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinkscope.present.paper.format import Format
from sinkscope.runs.paper_table import PaperTable

if TYPE_CHECKING:
    import pandas as pd

FORMULA, COMMAND = ("=", "+", "-", "@", "\t", "\r"), ("::", "##[")
"""Starts of a spreadsheet's formula, and of a line that a CI runner takes for a command."""


def csv_table(table: PaperTable) -> str:
    """The keys, then NAME, NAME_sem, NAME_low and NAME_high of each metric."""
    return without_formulas(table.frame).to_csv(index=False, float_format="%.9g", lineterminator="\n")


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """The table with an apostrophe before text that a spreadsheet takes for a formula, or a CI runner for a command."""
    frame = table.copy()
    for name in frame.select_dtypes(exclude="number"):
        frame[name] = frame[name].map(_plain)
    return frame


def with_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """The table that `without_formulas` was given."""
    frame = table.copy()
    for name in frame.select_dtypes(exclude="number"):
        frame[name] = frame[name].map(_bare)
    return frame


def _plain(cell: Any) -> Any:
    harmful = isinstance(cell, str) and (cell.startswith(FORMULA) or cell.lstrip().startswith(COMMAND))
    return f"'{cell}" if harmful else cell


def _bare(cell: Any) -> Any:
    """Without the apostrophe that `_plain` puts before a cell."""
    return cell[1:] if isinstance(cell, str) and cell and _plain(cell[1:]) == cell else cell


FORMAT = Format("csv", (".csv",), csv_table)
