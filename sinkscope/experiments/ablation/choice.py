"""Which heads are zeroed: those at the dormant end of a score, or drawn at random. Fractions are of all heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.dormancy import SCORES

LOW = (
    *(name for name, end in SCORES.items() if end == "low"),
    *("entropy", "residual_write", "value_drain", "ov_drain", "gate_open", "uniformity"),
)
HIGH = (
    *(name for name, end in SCORES.items() if end == "high"),
    *("bos_mass", "sink_score", "sink_rate", "sink_score_t64", "sink_rate_t64", "sink_margin", "first_argmax"),
    *("tail_mass", "learned_sink_mass", "logit_gap"),
)
"""The end of a score that is taken for dormant (2504.03889 for its own; a sink, or little written, for the others)."""

PLACE = ["stream", "layer", "module", "head"]


@dataclass(frozen=True)
class Score:
    """A column of heads.csv (or smoothing.csv), and whether low or high values are dormant."""

    column: str
    low: bool

    @property
    def name(self) -> str:
        return f"{self.column}:{'low' if self.low else 'high'}"


Heads = dict[str, list[int]]
"""Head numbers to zero, by the site's name."""


def read_score(text: str) -> Score:
    """Reads NAME, NAME:low or NAME:high. Raises SinkscopeError where the dormant end is not known."""
    column, _, end = text.partition(":")
    if end not in ("", "low", "high"):
        raise SinkscopeError(f"--score {text!r}: write NAME, NAME:low or NAME:high")
    plain = column.removesuffix("_ln")
    if not end and not any(name in (*LOW, *HIGH) for name in (column, plain)):
        raise SinkscopeError(
            f"--score {column!r}: which end is dormant? write {column}:low or {column}:high "
            "(`sinkscope metrics` lists the columns)"
        )
    low = end == "low" if end else column in LOW or (column not in HIGH and plain in LOW)
    return Score(column, low)


def read_fractions(text: str) -> list[float]:
    """Reads 0.05,0.1,0.2. Raises SinkscopeError for what is no share of the heads between 0 and 1."""
    try:
        fractions = [float(part) for part in text.split(",")]
    except ValueError:
        raise SinkscopeError(f"--fraction {text!r}: shares of the heads, e.g. 0.05,0.1,0.2") from None
    return check_fractions(fractions)


def check_fractions(fractions: list[float]) -> list[float]:
    """The fractions in rising order, each once. Raises SinkscopeError outside 0..1."""
    for fraction in fractions:
        if not 0 <= fraction <= 1:
            raise SinkscopeError(f"--fraction {fraction:g}: a share of the heads between 0 and 1 is needed")
    return sorted(set(fractions))


@dataclass(frozen=True)
class HeadTable:
    """The heads of a run, one row a head (means over its domains where it has several)."""

    rows: pd.DataFrame

    def count(self, fraction: float) -> int:
        """Heads in a fraction, rounded to the nearest. Raises SinkscopeError where a fraction above 0 is none."""
        number = int(fraction * len(self.rows) + 0.5)
        if fraction and not number:
            raise SinkscopeError(f"--fraction {fraction:g} of {len(self.rows)} heads is none: give a larger one")
        return number

    def ranked(self, score: Score) -> Heads:
        """All heads that have the score, dormant end first; ties in the order of layers and heads."""
        return _grouped(self._order(score))

    def dormant(self, score: Score, count: int) -> Heads:
        """The `count` most dormant heads. Raises SinkscopeError where fewer heads have the score."""
        order = self._order(score)
        if count > len(order):
            raise SinkscopeError(f"--score {score.column}: only {len(order)} of {len(self.rows)} heads have a value")
        return _grouped(order.head(count))

    def drawn(self, count: int, seed: int) -> Heads:
        """`count` heads drawn at random; a larger draw of the same seed holds the smaller one."""
        order = np.random.default_rng(seed).permutation(len(self.rows))
        return _grouped(self.rows.iloc[np.sort(order[:count])])

    def _order(self, score: Score) -> pd.DataFrame:
        there = self.rows[self.rows[score.column].notna()]
        return there.sort_values(score.column, ascending=score.low, kind="stable")


def head_table(heads: pd.DataFrame, smoothing: pd.DataFrame | None, scores: list[Score]) -> HeadTable:
    """The scores of a run's heads. Raises SinkscopeError for a score that is no number of a head."""
    merged = heads
    if smoothing is not None:
        keys = [*PLACE, *(["domain"] if "domain" in heads else [])]
        merged = heads.merge(smoothing[[*keys, *(c for c in smoothing if c not in heads)]], on=keys, how="left")
    for score in scores:
        known = score.column in merged and pd.api.types.is_float_dtype(merged[score.column])
        if not known or score.column.endswith("_sem"):
            raise SinkscopeError(
                f"--score {score.column!r} is no score of the run's heads; `sinkscope metrics` lists the columns"
            )
    columns = list(dict.fromkeys(score.column for score in scores))
    return HeadTable(merged.groupby(PLACE, sort=False)[columns].mean().reset_index())


def _grouped(rows: pd.DataFrame) -> Heads:
    return {str(module): [int(head) for head in own["head"]] for module, own in rows.groupby("module", sort=False)}
