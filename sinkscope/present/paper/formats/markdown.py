"""A paper's table as GitHub's Markdown."""

from __future__ import annotations

from sinkscope.present.numbers import MISSING
from sinkscope.present.paper.cells import Writing, is_number, written_rows
from sinkscope.present.paper.format import Format
from sinkscope.present.text import markdown_cell
from sinkscope.runs.paper_table import PaperTable


def markdown_table(table: PaperTable) -> str:
    """A GitHub table; cells are `mean ± standard error`."""
    heads = [markdown_cell(key) for key in table.keys]
    heads += [
        f"{markdown_cell(c.name)} ({markdown_cell(c.unit)})" if c.unit else markdown_cell(c.name) for c in table.columns
    ]
    marks = ["---"] * len(table.keys)
    marks += ["---:" if is_number(table, column.name) else "---" for column in table.columns]
    lines = [_line(heads), _line(marks)]
    lines += [_line(cells) for cells in written_rows(table, Writing(markdown_cell, MISSING, " ± "))]
    notes = "; ".join(markdown_cell(note) for note in table.notes)
    return "\n".join([*lines, "", f"± is the standard error over sequences. {notes}", ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


FORMAT = Format("markdown", (".md",), markdown_table)
