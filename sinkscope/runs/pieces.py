"""Tables put together from pieces of rows, one for each attention site."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def joined(pieces: list[dict[str, Any]], kinds: dict[str, str] | None = None) -> pd.DataFrame:
    """The table of pieces that have the same columns, in the order of the first one.

    A piece holds its columns by name: an array or list with a value for each row, or one value that all its rows have.
    `kinds`: the pandas type of the columns whose values do not tell it. Each column is put together once: a data frame
    for each piece takes ten times as long.
    """
    lengths = [max(len(value) for value in piece.values() if not _single(value)) for piece in pieces]
    columns = {name: _column([piece[name] for piece in pieces], lengths) for name in pieces[0]}
    return pd.DataFrame(columns).astype(kinds or {})


def _single(value: Any) -> bool:
    return isinstance(value, str) or not hasattr(value, "__len__")


def _column(values: list[Any], lengths: list[int]) -> Any:
    if any(isinstance(value, str) for value in values):
        return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    if any(isinstance(value, pd.api.extensions.ExtensionArray | pd.Series) for value in values):
        return pd.concat([pd.Series(value) for value in values], ignore_index=True)
    return np.concatenate([
        np.full(length, value) if _single(value) else np.asarray(value)
        for value, length in zip(values, lengths, strict=True)
    ])  # fmt: skip
