"""Numbers as text: one function per kind of number, with its digits, its sign and its mark for a missing value."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

MISSING = "-"


def is_missing(value: Any) -> bool:
    """True for None, NaN and pandas' NA."""
    return value is None or bool(pd.isna(value))


def significant(value: float | None, digits: int = 4, missing: str = MISSING) -> str:
    """Up to `digits` significant digits, without trailing zeros: 0.25, 1.5, 1.234e+05."""
    return missing if is_missing(value) else f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference: up to `digits` significant digits, always with its sign."""
    return MISSING if is_missing(value) else f"{value:+.{digits}g}"


def uncertainty(value: float | None) -> str:
    """A standard error: two significant digits."""
    return significant(value, 2)


def change(value: float | None, error: float | None) -> str:
    """A difference with its standard error, `+0.250 ± 0.012`: two significant digits of the error, and the difference
    as exact. The difference alone where the error is missing."""
    if value is None or error is None or is_missing(value) or is_missing(error):
        return signed(value)
    place = _second_digit(error)
    if place is None:
        return f"{signed(value)} ± {uncertainty(error)}"
    return f"{to_place(value, place)} ± {to_place(error, place).removeprefix('+')}"


def interval(low: float | None, high: float | None, places: int | None = None) -> str:
    """`low to high`, both with their signs.

    Both have `places` decimals. Without `places` both end at the second significant digit of the interval's width, or
    up to two digits further, so that an end near 0 shows on which side of it it is: -0.001 instead of -0.00.
    """
    if low is None or high is None or is_missing(low) or is_missing(high):
        return MISSING
    if places is not None:
        return f"{low:+.{places}f} to {high:+.{places}f}"
    place = _second_digit(high - low)
    if place is None:
        return f"{signed(low, 2)} to {signed(high, 2)}"
    further = (digit for digit in (place, place - 1, place - 2) if not _vanishes((low, high), digit))
    place = next(further, place)
    return f"{to_place(low, place)} to {to_place(high, place)}"


def _vanishes(ends: tuple[float, ...], place: int) -> bool:
    """Whether an end that is not 0 is shown as 0 down to 10**place."""
    return any(end != 0 and float(to_place(end, place)) == 0 for end in ends)


def _second_digit(width: float) -> int | None:
    """The power of ten at which a width has its second significant digit; None for 0 and for infinite widths."""
    return math.floor(math.log10(width)) - 1 if width > 0 and math.isfinite(width) else None


def to_place(value: float, place: int) -> str:
    """A number with its sign and its digits down to 10**place: `+0.20` for 0.2 and -2."""
    if not math.isfinite(value) or -6 <= place <= 3:
        return f"{value:+.{max(0, -place)}f}"
    if value == 0:
        return "+0"
    return f"{value:+.{max(0, math.floor(math.log10(abs(value))) - place)}e}"


def probability(value: float | None) -> str:
    """A p or q value: two significant digits; `<1e-9` below that."""
    if value is None or is_missing(value):
        return MISSING
    return "<1e-9" if value < 1e-9 else f"{value:.2g}"


def fixed(value: float | None, places: int, *, sign: bool = False, missing: str = MISSING) -> str:
    """A number with `places` decimals, so that the digits of a column line up.

    `sign`: a positive number gets a plus sign.
    """
    return missing if is_missing(value) else f"{value:{'+' if sign else ''}.{places}f}"


def estimate(
    value: float | None, error: float | None, places: int, *, sign: bool = False, missing: str = MISSING
) -> str:  # fmt: skip
    """A mean with its standard error, `places` decimals each: `0.833 ± 0.010`.

    The mean stands alone where the error is missing. `sign`: a positive mean gets a plus sign.
    """
    text = fixed(value, places, sign=sign, missing=missing)
    return text if is_missing(value) or is_missing(error) else f"{text} ± {error:.{places}f}"


def decimals(values: Any, halves: Any = ()) -> int:
    """Decimals for a column of numbers, 0 to 6.

    `halves` are half widths of intervals: the decimals show two significant digits of their median. Without half widths
    they show three significant digits of the largest value; whole numbers get none. Infinite values have no digits.
    """
    sizes = [abs(float(value)) for value in values if not is_missing(value) and math.isfinite(value)]
    widths = pd.Series([float(half) for half in halves if not is_missing(half) and half > 0], dtype=float)
    if len(widths):
        return _places(float(widths.median()), 2)
    if all(value == round(value) for value in sizes):
        return 0
    return _places(max(sizes), 3)


def _places(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits of `value`, at most 6."""
    return min(6, max(0, digits - 1 - math.floor(math.log10(value))))


def rounded(value: Any, digits: int = 3) -> Any:
    """A number for JSON with `digits` significant digits; None where it is missing or infinite.

    Returns values of other types unchanged.
    """
    if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def parameters(count: int) -> str:
    """A number of parameters: in millions from one million on."""
    return f"{count / 1e6:,.0f} M" if count >= 1e6 else f"{count:,}"


UNITS = {"MiB": 2**20, "GiB": 2**30}


def memory(count: int | None, unit: str, places: int = 0) -> str:
    """Bytes in MiB or GiB, with the unit."""
    return MISSING if count is None else f"{count / UNITS[unit]:,.{places}f} {unit}"
