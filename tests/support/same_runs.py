"""Holds two runs against each other, number by number."""

from __future__ import annotations

import numpy as np

from sinkscope import Run

TABLES = ("heads", "layers", "length_curve")


def assert_same(one: Run, other: Run, atol: float = 1e-5, tables: tuple[str, ...] = TABLES) -> None:
    """The two runs' tables hold the same numbers, and lack the same."""
    for name in tables:
        left, right = getattr(one, name), getattr(other, name)
        numbers = left.select_dtypes("number").columns
        assert list(left.columns) == list(right.columns)
        found, expected = (side[numbers].to_numpy(float, na_value=np.nan) for side in (left, right))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol, err_msg=name)
