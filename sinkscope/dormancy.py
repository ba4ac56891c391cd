"""Which heads are dormant: a rule on one of the published scores, never on BOS mass alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.metrics import METRICS

DEFAULT_RULE = "honor<0.4"


@dataclass(frozen=True)
class DormantRule:
    """`NAME<x` or `NAME>x` on the mean of a head column."""

    column: str
    below: bool
    bound: float

    def __call__(self, means: dict[str, np.ndarray]) -> np.ndarray:
        values = means[self.column]
        return values < self.bound if self.below else values > self.bound


def parse_rule(text: str) -> DormantRule:
    """Reads a --dormant-rule. Raises SinkscopeError for an unknown column or a rule of another form."""
    match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\deE]+)\s*", text)
    try:
        if match is None:
            raise ValueError
        bound = float(match[3])
    except ValueError:
        raise SinkscopeError(f'--dormant-rule {text!r}: write "NAME<x" or "NAME>x", e.g. "honor<0.4"') from None
    if match[1] not in METRICS["heads"]:
        raise SinkscopeError(
            f"--dormant-rule: {match[1]!r} is no per-sequence column of heads.csv; `sinkscope metrics` lists them"
        )
    return DormantRule(match[1], match[2] == "<", bound)


def dormant_in_some(heads: Any) -> list[dict[str, Any]]:
    """Heads dormant in one domain and not in another."""
    found = []
    for (stream, layer, head), rows in heads.groupby(["stream", "layer", "head"], sort=False):
        dormant = rows.loc[rows["dormant"].fillna(False).astype(bool), "domain"].tolist()
        if 0 < len(dormant) < len(rows):
            active = [name for name in rows["domain"] if name not in dormant]
            place = {"stream": stream, "layer": int(layer), "head": int(head)}
            found.append(place | {"dormant_in": dormant, "active_in": active})
    return found
