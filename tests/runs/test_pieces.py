"""Tables joined from pieces: the same as pandas' own concatenation of a frame for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sinkscope.tables.frames import joined

PIECES: list[dict[str, Any]] = [
    {
        "layer": 0, "head": np.arange(3), "module": "a", "score": np.array([0.5, np.nan, 1]), "kind": ["x", None, "y"],
        "flag": pd.array([True, None, False], dtype="boolean"), "known": True,
    },
    {
        "layer": 1, "head": np.arange(2), "module": "b", "score": np.array([1.0, 2.0]), "kind": [None, "z"],
        "flag": pd.array([None, None], dtype="boolean"), "known": False,
    },
]  # fmt: skip


def test_pieces_are_joined_as_pandas_joins_frames() -> None:
    expected = pd.concat([pd.DataFrame(piece).astype({"kind": "string"}) for piece in PIECES], ignore_index=True)
    pd.testing.assert_frame_equal(joined(PIECES, {"kind": "string"}), expected)


def test_one_piece() -> None:
    pd.testing.assert_frame_equal(joined(PIECES[1:]), pd.DataFrame(PIECES[1]))
