"""The trigger task's results as text: a scan's table of heads, the end of a training, our study beside the paper's."""

from __future__ import annotations

import csv
import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.numbers import MISSING, fixed, is_missing, significant
from sinkscope.present.terminal.table import aligned
from sinkscope.present.text import printable

if TYPE_CHECKING:
    import pandas as pd


WIDTH = 100


def render_task(task: dict[str, Any], width: int = WIDTH, meanings: bool = True) -> str:
    """What summary.json says of a task: the answer in words, one row per head, and what the columns mean."""
    names = ["layer", "head", *task["columns"]]
    rows = [[_cell(row[name]) for name in names] for row in task["heads"]]
    title = f"{task['name']} task, {printable(task['attention'])} attention, trigger at {task['trigger_position']}"
    lines = [title, *(_wrapped(sentence, width) for sentence in task["in_words"]), "", *_table([names, *rows])]
    if meanings:
        lines += ["", *(_wrapped(f"{name}: {text}", width, "  ") for name, text in task["columns"].items())]
    return "\n".join(lines) + "\n"


def task_csv(task: dict[str, Any]) -> str:
    """The rows of a task's heads as CSV, with every digit."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["layer", "head", *task["columns"]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(task["heads"])
    return text.getvalue()


def render_training(record: dict[str, Any], folder: Path) -> str:
    """Says in three lines how a training ended."""
    end = {
        "criterion": "solved: the largest error is below 0.005",
        "steps": "not solved: the largest error is not below 0.005",
    }
    last, evaluated = (significant(record[name]) for name in ("batch_error", "evaluation_error"))
    return (
        f"{end[record['stopped']]} ({record['steps']} steps)\n"
        f"largest absolute error: {last} in the last batch, {evaluated} on {record['evaluation_sequences']} evaluation "
        "sequences\n"
        f"written to {printable(str(folder))}: measure it with `sinkscope scan {printable(str(folder))}`\n"
    )


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
    lines = [_wrapped(notes, width), "", *_table([names, *rows]), ""]
    lines += [*(_wrapped(line, width) for line in verdict.splitlines()), ""]
    written = f"written to {printable(str(out))}: models.csv, heads.csv ({len(heads)} heads), forced_mass.csv"
    lines.append(_wrapped(written, width))
    return "\n".join(lines) + "\n"


def _span(low: float, high: float) -> str:
    return MISSING if is_missing(low) else f"{fixed(low, 3)} .. {fixed(high, 3)}"


def _cell(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, float) else str(value)


def _table(rows: list[list[str]]) -> list[str]:
    """Right-aligned columns, one blank apart, so that a task's columns fit into 80 characters."""
    return aligned(rows, left=0, gap=" ")


def _wrapped(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
