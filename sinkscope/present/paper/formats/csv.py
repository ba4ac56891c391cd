"""A paper's table as CSV: every column of its frame, nine significant digits."""

from __future__ import annotations

from typing import Any

from sinkscope.present.paper.format import Format
from sinkscope.runs.paper_table import PaperTable

FORMULA, COMMAND = ("=", "+", "-", "@", "\t", "\r"), ("::", "##[")
"""Starts of a spreadsheet's formula, and of a line that a CI runner takes for a command."""


def csv_table(table: PaperTable) -> str:
    """The keys, then NAME, NAME_sem, NAME_low and NAME_high of each metric.

    A spreadsheet takes text that begins with one of FORMULA for a formula, so an apostrophe stands before it.
    """
    frame = table.frame.copy()
    for name in frame.select_dtypes(exclude="number"):
        frame[name] = frame[name].map(_plain)
    return frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def _plain(cell: Any) -> Any:
    harmful = isinstance(cell, str) and (cell.startswith(FORMULA) or cell.lstrip().startswith(COMMAND))
    return f"'{cell}" if harmful else cell


FORMAT = Format("csv", (".csv",), csv_table)
