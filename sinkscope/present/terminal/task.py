"""What a scan says of a model's own task: the answer in words and a table of its heads."""

from __future__ import annotations

import csv
import io
import textwrap
from typing import Any

from sinkscope.present.numbers import fixed
from sinkscope.present.terminal.table import aligned
from sinkscope.present.text import printable

WIDTH = 100


def render_task(task: dict[str, Any], width: int = WIDTH, meanings: bool = True) -> str:
    """What summary.json says of a task: the answer in words, one row per head, and what the columns mean."""
    names = ["layer", "head", *task["columns"]]
    rows = [[_cell(row[name]) for name in names] for row in task["heads"]]
    title = f"{task['name']} task, {printable(task['attention'])} attention, trigger at {task['trigger_position']}"
    lines = [title, *(wrapped(sentence, width) for sentence in task["in_words"]), "", *task_table([names, *rows])]
    if meanings:
        lines += ["", *(wrapped(f"{name}: {text}", width, "  ") for name, text in task["columns"].items())]
    return "\n".join(lines) + "\n"


def task_csv(task: dict[str, Any]) -> str:
    """The rows of a task's heads as CSV, with every digit."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["layer", "head", *task["columns"]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(task["heads"])
    return text.getvalue()


def _cell(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, float) else str(value)


def task_table(rows: list[list[str]]) -> list[str]:
    """Right-aligned columns, one blank apart, so that a task's columns fit into 80 characters."""
    return aligned(rows, left=0, gap=" ")


def wrapped(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
