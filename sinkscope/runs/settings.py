"""The settings that columns of the whole run depend on: the sink threshold and the dormant rule."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sinkscope.errors import SinkscopeError

DEFAULT_RULE = "honor<0.4"


@dataclass(frozen=True)
class DormantRule:
    """`NAME<x` or `NAME>x` on the mean of a head column."""

    column: str
    below: bool
    bound: float

    def __call__(self, means: dict[str, np.ndarray]) -> np.ndarray:
        """True where the rule holds, by head; `means`: [head] of every column. NaN never holds."""
        values = means[self.column]
        return values < self.bound if self.below else values > self.bound


def parse_rule(text: str) -> DormantRule:
    """Reads a --dormant-rule. Raises SinkscopeError for one of another form."""
    match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\deE]+)\s*", text)
    try:
        if match is None:
            raise ValueError
        bound = float(match[3])
    except ValueError:
        raise SinkscopeError(f'--dormant-rule {text!r}: write "NAME<x" or "NAME>x", e.g. "honor<0.4"') from None
    return DormantRule(match[1], match[2] == "<", bound)


@dataclass(frozen=True)
class Settings:
    """What columns depend on: the sink threshold, the dormant rule, the sequences of a domain whose spectrum is taken
    (None: as many as are cheap). Raises SinkscopeError."""

    epsilon: float = 0.3
    dormant_rule: str = DEFAULT_RULE
    spectra: int | None = None

    def __post_init__(self) -> None:
        parse_rule(self.dormant_rule)
        if not 0 < self.epsilon < 1:
            raise SinkscopeError(f"--epsilon {self.epsilon}: a probability between 0 and 1 is needed")
        if self.spectra is not None and self.spectra < 0:
            raise SinkscopeError(f"--spectra {self.spectra}: a number of sequences is needed, 0 for none")

    def check_rule(self, names: Collection[str]) -> None:
        """Raises SinkscopeError where the dormant rule is on none of these per-sequence columns of heads.csv."""
        column = parse_rule(self.dormant_rule).column
        if column not in names:
            raise SinkscopeError(
                f"--dormant-rule: {column!r} is no per-sequence column of heads.csv; `sinkscope metrics` lists them"
            )
