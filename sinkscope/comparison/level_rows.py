"""The rows of one pair of domains at one level: every place's difference between two runs, tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from sinkscope.runs.per_sequence import cells
from sinkscope.runs.statistics import equivalence, false_discovery, holm, paired_difference, welch_difference

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

Pair = tuple[str, str, int | None]
"""(domain of a, domain of b, number of sequences taken from each; None takes all)."""


def level_rows(
    a: Run, b: Run, pair: Pair, level: str, names: list[str], paired: bool, margins: Mapping[str, float] | None = None
) -> pd.DataFrame:  # fmt: skip
    """One row per (metric, place) of a pair of domains, with the columns of Comparison's tables.

    `names`: per-sequence metrics; those that a run lacks at this level are left out. Empty where the runs have
    different places. `margins`: margins of equivalence by metric; without any, the columns on equivalence are left out.
    """
    first, second = cells(a, pair[0], level, names), cells(b, pair[1], level, names)
    shared = [name for name in first.names if name in second.names]
    if len(first.places) != len(second.places):  # the runs have different streams: rows cannot be matched
        return pd.DataFrame()
    frames = []
    for name in shared:
        x = first.values[: pair[2], :, first.names.index(name)]
        y = second.values[: pair[2], :, second.names.index(name)]
        result = paired_difference(x, y) if paired else welch_difference(x, y)
        rows = first.places.assign(
            metric=name, a=result.a, b=result.b, difference=result.difference, sem=result.sem,
            low=result.low, high=result.high, p=result.p, q=false_discovery(result.p),
        )  # fmt: skip
        rows.insert(0, "domain", pair[0])
        if margins:
            margin = margins.get(name, float("nan"))
            p = equivalence(result, margin)
            rows = rows.assign(margin=margin, p_equivalent=p, p_equivalent_holm=holm(p))
        frames.append(rows)
    return concatenated(frames)


def concatenated(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """All rows in one table; empty tables, which have no columns, are left out."""
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
