"""Which parameters of a test the fast tier takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values as parameters of a test; those not in `fast` are left to the full tier.

    Raises ValueError for a fast value that is none of the values: the fast tier would lose it in silence.
    """
    every = list(values)
    absent = [value for value in fast if value not in every]
    if absent:
        raise ValueError(f"not among the values: {absent}")
    return [value if value in fast else _slow(value) for value in every]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
