"""The heads whose state differs between two runs: a sink gained or lost, dormant or no longer.

A mean that lies near a threshold crosses it with every other text. A change of state therefore counts only where the
difference behind it holds: q < 0.05, by the same test and over the same heads as everywhere in the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.comparison.level_rows import Pair, level_rows
from sinkscope.runs.dormancy import parse_rule
from sinkscope.runs.per_sequence import PLACE
from sinkscope.runs.statistics import SIGNIFICANT

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

CHANGES = ("gained_sink", "lost_sink", "woke", "fell_dormant")

Listed = dict[str, list[dict[str, Any]]]
"""Heads by change: place (with the domain where there are several), metric, its means a and b, and q."""


@dataclass
class Changes:
    """Heads whose state differs. `held`: their difference holds. `within_noise`: it does not, or could not be tested.

    `notes`: sentences on what was not judged.
    """

    held: Listed = field(default_factory=lambda: {name: [] for name in CHANGES})
    within_noise: Listed = field(default_factory=lambda: {name: [] for name in CHANGES})
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, rows: pd.DataFrame, crossed: pd.Series, keys: list[str]) -> None:
        """Files the rows that crossed a threshold by whether their difference holds."""
        for row in rows.loc[crossed, [*keys, "metric", "a", "b", "q"]].to_dict("records"):
            (self.held if row["q"] < SIGNIFICANT else self.within_noise)[name].append(row)


def head_changes(a: Run, b: Run, pairs: list[Pair], paired: bool) -> Changes:
    """Compares the states of every head of each pair of domains; the runs must have the same heads.

    A sink: mean sink_score above the run's epsilon. Dormant: the run's dormant rule holds for the mean of its column.
    Dormancy is left out where the runs' rules name different columns, whose values have no difference.
    """
    asked_a, asked_b = a.manifest.request, b.manifest.request
    rules = parse_rule(asked_a.dormant_rule), parse_rule(asked_b.dormant_rule)
    keys = (["domain"] if len(pairs) > 1 else []) + PLACE["head"]
    found = Changes()
    one_column = rules[0].column == rules[1].column
    if not one_column:
        found.notes.append("the dormant rules name different columns, so changes of dormancy are not listed")
    for pair in pairs:
        rows = level_rows(a, b, pair, "head", ["sink_score"], paired)
        if len(rows):
            before, after = rows["a"] > asked_a.epsilon, rows["b"] > asked_b.epsilon
            found.add("gained_sink", rows, ~before & after, keys)
            found.add("lost_sink", rows, before & ~after, keys)
        rows = level_rows(a, b, pair, "head", [rules[0].column], paired) if one_column else pd.DataFrame()
        if len(rows):
            before, after = (
                pd.Series(rule({rule.column: rows[side].to_numpy()})) for rule, side in zip(rules, "ab", strict=True)
            )
            found.add("woke", rows, before & ~after, keys)
            found.add("fell_dormant", rows, ~before & after, keys)
    return found
