"""Which tests, and which of their parameters, are left to the full tier or to the nightly run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from random_share import SHARE

nightly = pytest.mark.skipif(SHARE < 1, reason="minutes, of what shorter tests ask as well: left to the nightly run")
"""For tests that take long and ask what a real model does, or put at length what shorter tests ask as well."""


def thinned(values: Iterable[Any], every: int = 4) -> list[Any]:
    """All values as parameters of a test where all random cases are drawn, as at night; elsewhere one of so many."""
    return list(values)[:: 1 if SHARE >= 1 else every]


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values as parameters of a test; those not in `fast` run in the full tier alone.

    Raises ValueError for a fast value that is not among the values: the fast tier would lose it silently.
    """
    every = list(values)
    absent = [value for value in fast if value not in every]
    if absent:
        raise ValueError(f"not among the values: {absent}")
    return [value if value in fast else _slow(value) for value in every]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
