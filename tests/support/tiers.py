"""Which tests, and which of their parameters, are left to the full tier or to the nightly run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from random_share import SHARE

nightly = pytest.mark.skipif(
    SHARE < 1, reason="minutes on a real model, of what tiny ones test: left to the nightly run"
)
"""For tests that take minutes and ask what a real model does, not whether the code is right."""


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
