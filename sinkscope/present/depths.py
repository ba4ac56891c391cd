"""A sentence on where the profiles of two models part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.comparison.depths import parting
from sinkscope.present.numbers import change, fixed, probability, significant
from sinkscope.present.text import printable

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
    return ", ".join(f"{_range(first[f'layer_{run}'], last[f'layer_{run}'])} of {run.upper()}" for run in "ab")


def _range(first: float, last: float) -> str:
    """`layer 3`, `layers 3 to 5`, `between layers 3 and 4`."""
    low, high = int(first // 1), int(-(-last // 1))
    if low == high:
        return f"layer {low}"
    return f"between layers {low} and {high}" if first == last else f"layers {low} to {high}"
