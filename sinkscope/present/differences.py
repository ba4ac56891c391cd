"""Sentences on a comparison for its screen and its page: where profiles part, and what is shown to be equivalent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.comparison.levels import parting
from sinkscope.present.numbers import change, fixed, is_missing, probability, significant
from sinkscope.present.text import printable
from sinkscope.runs.statistics import SIGNIFICANT

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.comparison.compare_runs import Comparison


def partings(result: Comparison) -> list[str]:
    """One sentence for each domain, stream and metric that was compared over relative depth."""
    if result.depths.empty:
        return []
    keys = [key for key in ("domain", "stream") if result.depths[key].nunique() > 1]
    said = []
    for _, rows in result.depths.groupby(["domain", "stream", "metric"], sort=False):
        where = ", ".join(printable(str(rows[key].iloc[0])) for key in keys)
        said.append(f"{printable(str(rows['metric'].iloc[0]))}{f' on {where}' if where else ''}: {_sentence(rows)}")
    return said


def _sentence(rows: pd.DataFrame) -> str:
    found = parting(rows)
    if found is None:
        return f"at none of {len(rows)} depths is the difference larger than chance explains (q < 0.05)"
    peak, stretch = found.peak, found.stretch
    said = (
        f"farthest apart at depth {fixed(peak['depth'], 2)} ({_layers(peak, peak)}): {significant(peak['a'], 3)} and "
        f"{significant(peak['b'], 3)}, difference {change(peak['difference'], peak['sem'])}, q {probability(peak['q'])}"
    )
    if len(stretch) > 1:
        first, last = stretch.iloc[0], stretch.iloc[-1]
        said += (
            f"; at least half of that from depth {fixed(first['depth'], 2)} to {fixed(last['depth'], 2)} "
            f"({_layers(first, last)})"
        )
    return f"{said}; q < 0.05 at {found.differing} of {found.depths} depths"


def _layers(first: pd.Series, last: pd.Series) -> str:
    return ", ".join(f"{layers_between(first[f'layer_{run}'], last[f'layer_{run}'])} of {run.upper()}" for run in "ab")


def layers_between(first: float, last: float) -> str:
    """`layer 3`, `layers 3 to 5`, `between layers 3 and 4`."""
    low, high = int(first // 1), int(-(-last // 1))
    if low == high:
        return f"layer {low}"
    return f"between layers {low} and {high}" if first == last else f"layers {low} to {high}"


# Sentences on what two one-sided tests show to be equivalent.


def equivalences(result: Comparison) -> list[str]:
    """One sentence for each domain, stream and metric with a margin; none where no margin was given."""
    if "margin" not in result.summary and "margin" not in result.heads:
        return []
    table = _joined(result)
    keys = [key for key in ("domain", "stream") if table[key].nunique() > 1]
    said = []
    for _, rows in table[table["margin"].notna()].groupby(["domain", "stream", "metric"], sort=False):
        where = ", ".join(printable(str(rows[key].iloc[0])) for key in keys)
        name = f"{printable(str(rows['metric'].iloc[0]))}{f' on {where}' if where else ''}"
        margin = significant(rows["margin"].iloc[0])
        parts = [_of_mean(rows[rows["level"] == "summary"]), _of_heads(rows[rows["level"] == "head"])]
        said.append(f"equivalence of {name} within ±{margin}: {'; '.join(filter(None, parts))}")
    return said


def _joined(result: Comparison) -> pd.DataFrame:
    """The rows of means and of heads in one table, with their level."""
    import pandas as pd

    named = (("summary", result.summary), ("head", result.heads))
    return pd.concat([table.assign(level=level) for level, table in named if len(table)], ignore_index=True)


def _of_mean(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    p = rows["p_equivalent"].iloc[0]
    if is_missing(p):
        return "the mean over all heads has too few sequences to be tested"
    shown = "is shown to be equivalent" if p < SIGNIFICANT else "is not shown to be equivalent"
    return f"the mean over all heads {shown} (two one-sided t-tests, p {probability(p)})"


def _of_heads(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    shown = int((rows["p_equivalent_holm"] < SIGNIFICANT).sum())
    return f"{shown} of {len(rows)} heads are shown to be equivalent (p < 0.05 after Holm's adjustment)"
