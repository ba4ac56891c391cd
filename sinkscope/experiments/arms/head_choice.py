"""Chooses heads by a score of a run, from its dormant end, or at random. Fractions are of all heads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import catalogue, near_column
from sinkscope.runs.dormancy import SCORES, share_of
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.saved.ablation import Heads

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

SHARE = re.compile(r"(low|high)?(\d+(?:\.\d+)?)%")

PLACE = ["stream", "layer", "module", "head"]


@dataclass(frozen=True)
class Score:
    """A column of heads.csv, or of another table with a row a head, and whether its low or high values mean dormant."""

    column: str
    low: bool

    @property
    def name(self) -> str:
        """`NAME:low` or `NAME:high`."""
        return f"{self.column}:{'low' if self.low else 'high'}"


def read_score(text: str) -> Score:
    """Reads NAME, NAME:low or NAME:high. Raises SinkscopeError for NAME alone if its dormant end is not known."""
    column, _, end = text.partition(":")
    if end not in ("", "low", "high"):
        raise SinkscopeError(f"--score {text!r}: write NAME, NAME:low or NAME:high")
    side = end or dormant_end(column)
    if side is None and column not in (names := [entry.name for entry in catalogue()]):
        raise SinkscopeError(
            f"--score {column!r}: sinkscope has no such column (`sinkscope metrics` lists them; a metric of your own "
            f"takes an end, {column}:low or {column}:high){near_column(column, names)}"
        )
    if side is None:
        raise SinkscopeError(
            f"--score {column!r}: are heads dormant where it is low or where it is high? write {column}:low or "
            f"{column}:high"
        )
    return Score(column, side == "low")


def dormant_end(column: str) -> str | None:
    """The end of a column at which a head is dormant, `low` or `high`; None where it is not known.

    The ends of SCORES, those of Sandoval-Segura et al. 2504.03889, and those that a column's declaration names: a head
    is dormant where it has a sink or writes little.
    """
    ends = {entry.name: entry.dormant for entry in catalogue() if entry.dormant} | SCORES
    return ends.get(column) or ends.get(column.removesuffix("_ln"))


def read_scored(rest: str) -> tuple[Score, float]:
    """Reads SCORE:5%, SCORE:low5% or SCORE:low:5%. Raises SinkscopeError for any other text."""
    name, _, share = rest.rpartition(":")
    parts = SHARE.fullmatch(share)
    if not name or parts is None or not 0 < float(parts[2]) <= 100:
        raise SinkscopeError(f"{rest[:40]!r} names no heads")
    return read_score(f"{name}:{parts[1]}" if parts[1] else name), float(parts[2]) / 100


def read_fractions(text: str) -> list[float]:
    """Reads fractions such as `0.05,0.1,0.2`. Raises SinkscopeError where one is not a number from 0 to 1."""
    try:
        fractions = [float(part) for part in text.split(",")]
    except ValueError:
        raise SinkscopeError(f"--fraction {text!r}: give shares of the heads, e.g. 0.05,0.1,0.2") from None
    return check_fractions(fractions)


def check_fractions(fractions: list[float]) -> list[float]:
    """Returns the fractions in rising order, each once. Raises SinkscopeError for one outside 0 to 1."""
    for fraction in fractions:
        if not 0 <= fraction <= 1:
            raise SinkscopeError(f"--fraction {fraction:g}: a share of the heads between 0 and 1 is needed")
    return sorted(set(fractions))


@dataclass(frozen=True)
class HeadTable:
    """The scores of a run's heads, one row per head: means over its domains where the run has several."""

    rows: pd.DataFrame

    def count(self, fraction: float) -> int:
        """Number of heads in a fraction, rounded. Raises SinkscopeError where a fraction above 0 rounds to 0 heads."""
        number = share_of(fraction, len(self.rows))
        if fraction and not number:
            raise SinkscopeError(f"{fraction:g} of {len(self.rows)} heads is no head: give a larger share")
        return number

    def dormant(self, score: Score, count: int) -> Heads:
        """The `count` most dormant heads; ties keep the order of layers and heads. Raises SinkscopeError if fewer heads
        have the score."""
        order = self._order(score)
        if count > len(order):
            raise SinkscopeError(f"{score.column}: only {len(order)} of {len(self.rows)} heads have a value")
        return _grouped(order.head(count))

    def drawn(self, count: int, seed: int, draw: int) -> Heads:
        """`count` heads drawn at random; a larger count with the same seed and draw contains the smaller one's."""
        order = np.random.default_rng([seed, draw]).permutation(len(self.rows))
        return _grouped(self.rows.iloc[np.sort(order[:count])])

    def _order(self, score: Score) -> pd.DataFrame:
        scored = self.rows[self.rows[score.column].notna()]
        return scored.sort_values(score.column, ascending=score.low, kind="stable")


def head_table(run: Run, scores: list[Score]) -> HeadTable:
    """The scores of a run's heads. Raises SinkscopeError for a score that is not a numeric column of the heads."""
    keys = [*PLACE, *(["domain"] if "domain" in run.heads else [])]
    merged = run.heads
    for table in run.measured.values():
        if set(keys) <= set(table) and not table.duplicated(keys).any():
            merged = merged.merge(table[[*keys, *(c for c in table if c not in merged)]], on=keys, how="left")
    for score in scores:
        numeric = score.column in merged and pd.api.types.is_float_dtype(merged[score.column])
        if not numeric or score.column.endswith("_sem"):
            raise SinkscopeError(f"{score.column!r} is no score of the run's heads{_remedy(score.column, merged)}")
    columns = list(dict.fromkeys(score.column for score in scores))
    return HeadTable(merged.groupby(PLACE, sort=False)[columns].mean().reset_index())


def _remedy(column: str, heads: pd.DataFrame) -> str:
    """What to do about a score that the run lacks: the question that measures it, or the names that are near."""
    tables = {entry.table for entry in catalogue() if entry.name == column}
    asked = [name for name, question in QUESTIONS.items() if tables & {table.name for table in question.tables}]
    if asked:
        return f": scan it with --measure {asked[0]}"
    return f"; `sinkscope metrics` lists the columns{'' if column in heads else near_column(column, heads.columns)}"


def _grouped(rows: pd.DataFrame) -> Heads:
    return {str(module): [int(head) for head in part["head"]] for module, part in rows.groupby("module", sort=False)}
