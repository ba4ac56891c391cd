"""The trigger task opened, as text: a model at several lengths, one written down, default x attention x seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.numbers import fixed, significant
from sinkscope.present.terminal.table import aligned
from sinkscope.present.text import printable

if TYPE_CHECKING:
    import pandas as pd

LENGTH_NOTE = (
    "error: largest absolute error; bos: mean of A[i,0] over rows i >= 1 without a trigger, min: its smallest row,\n"
    "trigger: the trigger's row; share: Gu et al.'s proxy |A[i,0]| over the row's sum; pattern: by A, and by share."
)


def render_lengths(table: pd.DataFrame, trained: int) -> str:
    """One line per length, trigger's position and head."""
    names = ["length", "trigger", "error", "layer", "head", "bos", "min", "trigger", "share", "pattern", "by share"]
    rows = [
        [
            str(row["length"]), str(row["trigger"]), significant(row["error"], 3), str(row["layer"]), str(row["head"]),
            fixed(row["bos_mean"], 4), fixed(row["bos_min"], 4), fixed(row["bos_trigger"], 4),
            fixed(row["share_mean"], 4), row["pattern"], row["pattern_share"],
        ]
        for row in table.to_dict("records")
    ]  # fmt: skip
    return "\n".join([f"trained at length {trained}", LENGTH_NOTE, "", *aligned([names, *rows], left=0)]) + "\n"


def render_explicit(record: dict[str, Any], error: float, folder: Path) -> str:
    """Says what was written, and its error on the evaluation sequences."""
    where = printable(str(folder))
    return (
        f"largest absolute error on 1000 evaluation sequences: {significant(error, 3)}\n"
        f"written to {where}: measure it with `sinkscope trigger scan {where}`\n"
        f"again: {printable(record['command'])}\n"
    )


def render_summary(table: pd.DataFrame) -> str:
    """study.csv in Markdown, one line per default, heads and attention, with the range over the seeds."""
    groups = [(key, group) for key, group in table.groupby(["heads", "default", "attention"], sort=False)]
    names = [
        "heads", "default", "attention", "solved", "steps", "error", "explained", "pattern", "by share", "BOS", "self",
        "row sum", "trigger's BOS",
    ]  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for (heads, default, attention), group in groups:
        cells = [
            str(heads), default, attention, f"{group['solved'].sum()} of {len(group)}", _span(group["steps"], "{:.0f}"),
            _span(group["error"], "{:.3g}"), _span(group["explained"], "{:.3f}"), _counts(group["pattern"]),
            _counts(group["pattern_share"]),
            *(_span(group[name], "{:.3f}") for name in ("bos_mean", "self_mean", "total_mean", "bos_trigger")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _span(values: pd.Series, form: str) -> str:
    low, high = (form.format(value) for value in (values.min(), values.max()))
    return low if low == high else f"{low} .. {high}"


def _counts(names: pd.Series) -> str:
    """`sink`, or `sink 2, spread 1` where seeds differ."""
    counts = names.value_counts()
    return str(counts.index[0]) if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts.items())
