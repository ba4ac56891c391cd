"""A paper's table as CSV: every column of its frame, nine significant digits."""

from __future__ import annotations

from sinkscope.present.paper.format import Format
from sinkscope.runs.paper_table import PaperTable


def csv_table(table: PaperTable) -> str:
    """The keys, then NAME, NAME_sem, NAME_low and NAME_high of each metric."""
    return table.frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")


FORMAT = Format("csv", (".csv",), csv_table)
