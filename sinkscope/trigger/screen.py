"""The trigger task's results as text: the end of a training, and our study beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.numbers import MISSING, fixed, is_missing, significant
from sinkscope.present.terminal.run_parts import task_table
from sinkscope.present.terminal.table import fitted
from sinkscope.present.text import WIDTH, next_command, printable, wrapped

if TYPE_CHECKING:
    import pandas as pd


def render_training(record: dict[str, Any], folder: Path) -> str:
    """Says how a training ended, and where its model is."""
    bound = f"{record.get('tolerance', 0.005):g}"  # a record of 0.1 or 0.2 names none
    end = {
        "criterion": f"solved: the largest error is below {bound}",
        "steps": f"not solved: the largest error is not below {bound}",
    }
    last, evaluated = (significant(record[name]) for name in ("batch_error", "evaluation_error"))
    told = (
        f"{end[record['stopped']]} ({record['steps']} steps)",
        f"largest absolute error: {last} in the last batch, {evaluated} on {record['evaluation_sequences']} evaluation "
        "sequences",
    )
    lines = [line for sentence in told for line in wrapped(sentence, rest="  ")]
    return "\n".join([*lines, f"written to {printable(str(folder))}", f"next: {next_command('scan', folder)}", ""])


def render_study(models: pd.DataFrame, heads: pd.DataFrame, verdict: str, out: Path, width: int = WIDTH) -> str:
    """Our models beside the paper's: heads with a sink, and the extremes of mean BOS mass over non-trigger rows."""
    names = [
        "attention", "size", "seed", "steps", "solved", "eval error", "sinks", "published", "bos_mean", "published",
    ]  # fmt: skip
    rows = []
    for row in models.to_dict("records"):
        published = fixed(row["published_sinks"], 0)
        rows.append([
            row["attention"], f"{row['layers']}x{row['heads']}", str(row["seed"]), str(row["steps"]),
            "yes" if row["solved"] else "no", significant(row["evaluation_error"], 3), str(row["sinks"]), published,
            _span(row["bos_mean_min"], row["bos_mean_max"]),
            _span(row["published_bos_mean_min"], row["published_bos_mean_max"]),
        ])  # fmt: skip
    notes = "sinks: heads with bos_mean >= 0.9; bos_mean: smallest .. largest head; published: one seed, off figures"
    lines = [*wrapped(notes, width), "", *task_table([names, *rows]), ""]
    lines += [*(part for line in verdict.splitlines() for part in wrapped(line, width)), ""]
    written = f"written to {printable(str(out))}: models.csv, heads.csv ({len(heads)} heads), forced_mass.csv"
    lines += wrapped(written, width)
    return "\n".join(lines) + "\n"


def _span(low: float, high: float) -> str:
    return MISSING if is_missing(low) else f"{fixed(low, 3)} .. {fixed(high, 3)}"


LENGTH_NOTE = (
    "at: position of the trigger. error: largest absolute error. head: layer.head. bos: mean of A[i,0] over rows "
    "i >= 1 without a trigger; min: its smallest row; trigger's: A[i,0] of the trigger's row. share: mean of Gu et "
    "al.'s proxy, |A[i,0]| over the row's sum. pattern: by A, and by share."
)


def render_lengths(table: pd.DataFrame, trained: int) -> str:
    """One line per length, trigger's position and head, and below them what the columns are."""
    names = ["length", "at", "error", "head", "bos", "min", "trigger's", "share", "pattern", "by share"]
    rows = [
        [
            str(row["length"]), str(row["trigger"]), significant(row["error"], 3), f"{row['layer']}.{row['head']}",
            fixed(row["bos_mean"], 4), fixed(row["bos_min"], 4), fixed(row["bos_trigger"], 4),
            fixed(row["share_mean"], 4), row["pattern"], row["pattern_share"],
        ]
        for row in table.to_dict("records")
    ]  # fmt: skip
    lines = [f"trained at length {trained}", "", *fitted([names, *rows], left=0), "", *wrapped(LENGTH_NOTE)]
    return "\n".join([*lines, ""])


def render_explicit(record: dict[str, Any], error: float, folder: Path) -> str:
    """Says what was written, and its error on the evaluation sequences."""
    return (
        f"largest absolute error on 1000 evaluation sequences: {significant(error, 3)}\n"
        f"written to {printable(str(folder))}\n"
        f"again: {printable(record['command'])} FOLDER\n"
        f"next: {next_command('trigger', 'scan', folder)}\n"
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
            str(heads), default, attention, f"{group['solved'].sum()} of {len(group)}",
            _extremes(group["steps"], "{:.0f}"), _extremes(group["error"], "{:.3g}"),
            _extremes(group["explained"], "{:.3f}"), _counts(group["pattern"]),
            _counts(group["pattern_share"]),
            *(_extremes(group[name], "{:.3f}") for name in ("bos_mean", "self_mean", "total_mean", "bos_trigger")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def render_necessity(table: pd.DataFrame) -> str:
    """necessity.csv in Markdown, one line a case, with the range over the seeds."""
    names = [
        "changed", "", "solution without a sink", "solved", "steps", "error", "BOS, raw", "BOS, share", "row sum",
        "seeds with a sink",
    ]  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for (group, case), rows in table.groupby(["group", "case"], sort=False):
        cells = [
            group, case, rows["sinkless"].iloc[0], f"{rows['solved'].sum()} of {len(rows)}",
            _extremes(rows["steps"], "{:.0f}"), _extremes(rows["error"], "{:.2g}"),
            *(_extremes(rows[name], "{:.3f}") for name in ("bos_mean", "bos_share", "total_mean")),
            f"{(rows['sinks'] > 0).sum()} of {len(rows)}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _extremes(values: pd.Series, form: str) -> str:
    low, high = (form.format(value) for value in (values.min(), values.max()))
    return low if low == high else f"{low} .. {high}"


def _counts(names: pd.Series) -> str:
    """`sink`, or `sink 2, spread 1` where seeds differ."""
    counts = names.value_counts()
    return str(counts.index[0]) if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts.items())
