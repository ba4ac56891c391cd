"""A paper's table as Parquet: every column of its frame, every digit."""

from __future__ import annotations

import io

from sinkscope.present.paper.format import Format
from sinkscope.runs.paper_table import PaperTable


def parquet_table(table: PaperTable) -> bytes:
    """The keys, then NAME, NAME_sem, NAME_low and NAME_high of each metric."""
    buffer = io.BytesIO()
    table.frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


FORMAT = Format("parquet", (".parquet",), parquet_table, binary=True)
