"""Which heads are dormant: a rule on the mean of one column of heads.csv, by default a published score."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import near_column
from sinkscope.runs.schema.stream import DormancyScores, MixedHead

if TYPE_CHECKING:
    import pandas as pd

SCORES = {
    "awft": "high", "awft_ln": "high", "aeqd": "low", "aeqd_ln": "low", "ftvvn": "low", "ftvvn_ln": "low",
    "avvn": "low", "avvn_ln": "low", "lthon": "low", "lthon_ln": "low", "lthon_hn": "low", "ahon": "low",
    "honor": "low",
}  # fmt: skip
"""The thirteen scores of Sandoval-Segura et al. 2504.03889, and which end means dormant (the ends are our choice)."""

FRACTION = 0.1
"""Share of the heads taken as each score's most dormant ones when the scores are compared with each other."""

SAME = 1e-6
"""A score whose values spread by less than this, relative to the largest, varies by rounding alone."""

Head = tuple[int, int]
"""(layer, head) in one stream."""


@dataclass(frozen=True)
class DormantRule:
    """`NAME<x` or `NAME>x`, applied to the mean of a column of heads.csv."""

    column: str
    below: bool
    bound: float

    def __call__(self, means: dict[str, np.ndarray]) -> np.ndarray:
        """Whether the rule holds, [head]; `means`: [head] values by column. It never holds for NaN."""
        values = means[self.column]
        return values < self.bound if self.below else values > self.bound


def parse_rule(text: str) -> DormantRule:
    """Reads `NAME<x` or `NAME>x`. Raises SinkscopeError for any other text."""
    match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\deE]+)\s*", text)
    try:
        if match is None:
            raise ValueError
        bound = float(match[3])
    except ValueError:
        raise SinkscopeError(f'--dormant-rule {text!r}: write "NAME<x" or "NAME>x", e.g. "honor<0.4"') from None
    return DormantRule(match[1], match[2] == "<", bound)


def check_rule(text: str, names: Collection[str]) -> None:
    """Raises SinkscopeError where the rule's column is not among `names`, the per-sequence columns of heads.csv."""
    column = parse_rule(text).column
    if column not in names:
        raise SinkscopeError(
            f"--dormant-rule: {column!r} is no per-sequence column of heads.csv; `sinkscope metrics` lists "
            f"them{near_column(column, names)}"
        )


def most_dormant(heads: pd.DataFrame, score: str, count: int) -> list[Head]:
    """The `count` heads at a score's dormant end, most dormant first; ties keep the order of `heads`.

    `heads`: rows of one stream with `layer`, `head` and the score. Heads without the score are left out.
    """
    values = heads[score].to_numpy(float, na_value=np.nan)
    rows = np.flatnonzero(~np.isnan(values))
    order = np.argsort(values[rows] if SCORES[score] == "low" else -values[rows], kind="stable")
    layers, numbers = heads["layer"].to_numpy(), heads["head"].to_numpy()
    return [(int(layers[row]), int(numbers[row])) for row in rows[order][:count]]


def share_of(fraction: float, count: int) -> int:
    """How many of `count` heads a fraction is: the nearest whole number, halves up. 0.29 of 50 is a half, though the
    product of the floats lies below 14.5."""
    return int(round(fraction * count, 9) + 0.5)


def overlap(first: list[Head], second: list[Head]) -> float:
    """Intersection over union of two sets of heads, in [0, 1]; NaN where both are empty."""
    union = set(first) | set(second)
    return len(set(first) & set(second)) / len(union) if union else float("nan")


def agreement(heads: pd.DataFrame) -> DormancyScores:
    """Compares the tenth of the heads that each of the thirteen scores ranks most dormant.

    Every score selects the same number of heads, so that no threshold matters; `overlap` is the intersection over
    union of each pair of scores. With several domains, heads are ranked by the mean over domains. A score that is the
    same for all heads is left out: it ranks nothing (an example is avvn_ln where layers have one key/value head).
    """
    scores = [name for name in SCORES if name in heads]
    means = heads.groupby(["layer", "head"], sort=False)[scores].mean().reset_index()
    scores = [name for name in scores if _varies(means[name])]
    count = max(1, share_of(FRACTION, len(means)))
    selected = {name: most_dormant(means, name, count) for name in scores}
    return DormancyScores(
        fraction=FRACTION,
        count=count,
        most_dormant=selected,
        overlap={a: {b: overlap(selected[a], selected[b]) for b in scores} for a in scores},
    )


def _varies(values: pd.Series) -> bool:
    numbers = values.to_numpy(float, na_value=np.nan)
    known = numbers[~np.isnan(numbers)]
    return len(known) > 0 and bool(np.ptp(known) > SAME * np.abs(known).max())


def dormant_in_some(heads: pd.DataFrame) -> list[MixedHead]:
    """Heads that are dormant in some domains and not in others."""
    mixed = []
    for (stream, layer, head), rows in heads.groupby(["stream", "layer", "head"], sort=False):
        dormant = rows.loc[rows["dormant"].fillna(False).astype(bool), "domain"].tolist()
        active = rows.loc[~rows["dormant"].fillna(True).astype(bool), "domain"].tolist()
        if dormant and active:
            place = {"stream": stream, "layer": int(layer), "head": int(head)}
            mixed.append(MixedHead(**place, dormant_in=dormant, active_in=active))
    return mixed
