"""Tables as Parquet: what its library says of a failure becomes one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError, first_line

if TYPE_CHECKING:
    import pandas as pd


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """The table as a Parquet file, without its index. Raises SinkscopeError where pyarrow fails."""
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, index=False)
    except Exception as error:  # a full memory, a version that does not go with pandas: pyarrow may raise anything
        raise SinkscopeError(f"pyarrow cannot write a table as Parquet: {first_line(error)}") from error
    return buffer.getvalue()


def save_parquet(table: pd.DataFrame, path: Path) -> None:
    """Writes the table to a new file. Raises OSError where the disk is full; SinkscopeError where pyarrow fails."""
    try:
        table.to_parquet(path, index=False)
    except OSError as error:
        if error.errno is None:  # pyarrow's own, not the disk's
            raise SinkscopeError(f"pyarrow cannot write {path.name}: {first_line(error)}") from error
        raise
    except Exception as error:
        raise SinkscopeError(f"pyarrow cannot write {path.name}: {first_line(error)}") from error
