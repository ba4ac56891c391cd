"""Sentences on a comparison for its screen and its page: where profiles part, massive activations and sink tokens, and
what is shown to be equivalent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.comparison.levels import parting
from sinkscope.present.numbers import change, fixed, is_missing, probability, significant
from sinkscope.present.text import printable, token_text
from sinkscope.runs.catalogue import whose
from sinkscope.runs.statistics import SIGNIFICANT

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.comparison.compare_runs import Comparison


def largest(rows: pd.DataFrame) -> float:
    """The largest finite difference of heads, in absolute value; 0 where there is none."""
    sizes = rows["difference"].abs()
    return float(sizes[np.isfinite(sizes)].max()) if np.isfinite(sizes).any() else 0.0


def no_difference(rows: pd.DataFrame) -> str:
    """What is said of a metric where `largest` is 0."""
    there, endless = int(rows["difference"].notna().sum()), int(np.isinf(rows["difference"]).sum())
    if not there:
        return "no head has a value in both runs"
    if endless:
        return f"infinite in one run in {endless} heads, no difference in the others"
    return f"no difference in any {'head' if there == len(rows) else f'of the {there} heads with a value in both runs'}"


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
    split = parting(rows)
    if split is None:
        return f"at none of {len(rows)} depths is the difference larger than chance explains (q < 0.05)"
    peak, stretch = split.peak, split.stretch
    said = (
        f"of the depths with q < {SIGNIFICANT:g}, farthest apart at depth {fixed(peak['depth'], 2)} "
        f"({_layers(peak, peak)}): {significant(peak['a'], 3)} and "
        f"{significant(peak['b'], 3)}, difference {change(peak['difference'], peak['sem'])}, q {probability(peak['q'])}"
    )
    if len(stretch) > 1:
        first, last = stretch.iloc[0], stretch.iloc[-1]
        said += (
            f"; at least half of that from depth {fixed(first['depth'], 2)} to {fixed(last['depth'], 2)} "
            f"({_layers(first, last)})"
        )
    return f"{said}; q < 0.05 at {split.differing} of {split.depths} depths"


def _layers(first: pd.Series, last: pd.Series) -> str:
    return ", ".join(f"{layers_between(first[f'layer_{run}'], last[f'layer_{run}'])} of {run.upper()}" for run in "ab")


def layers_between(first: float, last: float) -> str:
    """`layer 3`, `layers 3 to 5`, `between layers 3 and 4`."""
    low, high = int(first // 1), int(-(-last // 1))
    if low == high:
        return f"layer {low}"
    return f"between layers {low} and {high}" if first == last else f"layers {low} to {high}"


# Sentences on massive activations and on the tokens that are sinks.


NAMED = 3
"""Most tokens that a sentence names."""


def states(result: Comparison) -> list[str]:
    """One sentence on massive activations for each stream, and one on the tokens that are attention sinks in A or B."""
    several = len(result.massive) > 1
    said = [_massive(row, several) for row in result.massive.to_dict("records")]
    if len(result.tokens):
        streams = result.tokens.groupby("stream", sort=False)
        said += [_tokens(rows, str(name) if len(streams) > 1 else "") for name, rows in streams]
    return said


def _massive(row: dict[Any, Any], several: bool) -> str:
    where = f" of {printable(str(row['stream']))}" if several else ""
    if not row["present_a"] and not row["present_b"]:
        values = " and ".join(significant(row[f"max_abs_{run}"]) for run in "ab")
        return f"massive activations{where}: none in A or B; the largest |x| is {values}"
    return f"massive activations{where}: {'; '.join(_massive_of(row, run) for run in 'ab')}"


def _massive_of(row: dict[Any, Any], run: str) -> str:
    most = significant(row[f"max_abs_{run}"])
    if not row[f"present_{run}"]:
        return f"{run.upper()} none, the largest |x| is {most}"
    tokens = significant(row[f"massive_tokens_{run}"], 3)
    layer = f"{row[f'layer_{run}']:.0f}"
    said = f"{run.upper()} up to {most} (in the input of layer {layer})"
    return f"{said}, on average {tokens} tokens of a sequence in the layer with most"


def _tokens(rows: pd.DataFrame, stream: str) -> str:
    in_a, in_b = rows["sinks_a"] > 0, rows["sinks_b"] > 0
    parts = [
        f"{label} {_named(tokens)}"
        for label, tokens in (("in both", rows[in_a & in_b]), ("only in A", rows[~in_b]), ("only in B", rows[~in_a]))
        if len(tokens)
    ]
    return f"tokens that are attention sinks{f' of {printable(stream)}' if stream else ''}: {'; '.join(parts)}"


def _named(rows: pd.DataFrame) -> str:
    shown = ", ".join(
        f"'{token_text(row['token'])}'{' at position 0' if row['first'] else ''} ({_counts(row)})"
        for row in rows.head(NAMED).to_dict("records")
    )
    return shown + (f" and {len(rows) - NAMED} more" if len(rows) > NAMED else "")


def _counts(row: dict[Any, Any]) -> str:
    """`8 of 8 occurrences`; where the runs differ, `11 of 42 in A, 3 of 42 in B`."""
    counts = {run: f"{row[f'sinks_{run}']} of {row[f'occurrences_{run}']:.0f}" for run in "ab" if row[f"sinks_{run}"]}
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} occurrences"
    return ", ".join(f"{count} in {run.upper()}" for run, count in counts.items())


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
    p, mean = rows["p_equivalent"].iloc[0], f"the mean over all {whose(rows['metric'])}"
    if is_missing(p):
        return f"{mean} {_untested(rows.iloc[0])}"
    shown = "is shown to be equivalent" if p < SIGNIFICANT else "is not shown to be equivalent"
    return f"{mean} {shown} (two one-sided t-tests, p {probability(p)})"


def _untested(row: pd.Series) -> str:
    """Why a difference has no test."""
    endless = [run.upper() for run in "ab" if np.isinf(row[run])]
    if endless:
        return f"cannot be tested: it is infinite in {' and '.join(endless)}"
    if is_missing(row["difference"]):
        return "cannot be tested: no sequence has a finite value in both runs"
    return "has too few sequences to be tested"


def _of_heads(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    shown = int((rows["p_equivalent_holm"] < SIGNIFICANT).sum())
    return f"{shown} of {len(rows)} heads are shown to be equivalent (p < 0.05 after Holm's adjustment)"
