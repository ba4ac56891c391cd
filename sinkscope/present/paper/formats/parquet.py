"""A paper's table as Parquet: every column of its frame, every digit."""

from __future__ import annotations

from sinkscope.present.paper.format import Format
from sinkscope.runs.folder import parquet_bytes
from sinkscope.runs.paper_table import PaperTable


def parquet_table(table: PaperTable) -> bytes:
    """The keys, then NAME, NAME_sem, NAME_low and NAME_high of each metric."""
    return parquet_bytes(table.frame)


FORMAT = Format("parquet", (".parquet",), parquet_table, binary=True)
