"""A paper's table as LaTeX: booktabs rules, siunitx columns."""

from __future__ import annotations

import math

from sinkscope.present.paper.cells import (
    Writing,
    errors,
    in_words,
    is_number,
    mathematics,
    places,
    places_of,
    written_rows,
)
from sinkscope.present.paper.format import Format
from sinkscope.present.text import printable
from sinkscope.runs.paper_table import PaperColumn, PaperTable

SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}", "]": "{]}", "|": r"\textbar{}", '"': r"\char34{}",
}  # fmt: skip
"""\\textquotedbl would need the package fontenc, and a bare sign is a command under babel."""


MEANING = "the standard error over sequences"
"""Of the number after the sign."""
UNPARTED = 4
"""Most decimals that siunitx prints without a space among them."""
WIDE = 3
"""Most metrics, each with its error, that fit one column of a page of two."""


def escape(text: str) -> str:
    """LaTeX that prints the text as it is."""
    return "".join(SIGNS.get(char, char) for char in printable(text))


WRITING = Writing(escape, missing="{--}", between=r" \pm ", infinite="{{{}inf}}")
"""siunitx takes what stands in braces as text: a column of numbers takes no other text."""


def latex_table(table: PaperTable) -> str:
    r"""A `tabular` to \input; the preamble needs \usepackage{booktabs,siunitx}.

    Numbers stand in siunitx S columns as `mean \pm standard error`, printed so and not as 0.342(81). With a
    caption or a label the tabular stands in a table of its own; one of more than WIDE metrics spans both columns of a
    page.
    """
    layout = [_layout(table, column) for column in table.columns]
    numbers = [is_number(table, key) for key in table.keys]
    spec = " ".join(["r" if number else "l" for number in numbers] + layout)
    lines = [f"% {printable(note)}" for note in table.notes]
    lines += [
        f"% +- is {MEANING}. Needs \\usepackage{{booktabs,siunitx}}.",
        f"\\begin{{tabular}}{{{spec}}}",
        "\\toprule",
        _line([escape(key) for key in table.keys] + [f"{{{_heading(table, column)}}}" for column in table.columns]),
        _line([""] * len(table.keys) + [f"{{({escape(column.unit)})}}" for column in table.columns]),
        "\\midrule",
    ]
    lines += [_line(cells) for cells in written_rows(table, WRITING)]
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join([*_floating(table, lines), ""])


def _heading(table: PaperTable, column: PaperColumn) -> str:
    """The column as papers write it: mathematics where there is some, else its name in words."""
    return mathematics(column.name) or escape(in_words(column.name, table.first_mass))


def _floating(table: PaperTable, lines: list[str]) -> list[str]:
    """The lines within a table environment, where there is a caption or a label."""
    if table.caption is None and table.label is None:
        return lines
    kind = "table*" if len(table.columns) > WIDE else "table"
    head = [f"\\begin{{{kind}}}", "\\centering"]
    head += [] if table.caption is None else [f"\\caption{{{_captioned(table, table.caption)}}}"]
    head += [] if table.label is None else [f"\\label{{{table.label}}}"]
    return [*head, *lines, f"\\end{{{kind}}}"]


def _captioned(table: PaperTable, caption: str) -> str:
    """The caption, with the meaning of the errors where the table has any."""
    if not any(column.interval for column in table.columns):
        return escape(caption)
    end = "" if caption.rstrip().endswith((".", "!", "?")) else "."
    return f"{escape(caption.rstrip())}{end} Values after $\\pm$ are {MEANING}."


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _layout(table: PaperTable, column: PaperColumn) -> str:
    """`l` for words; for numbers an S column that fits every cell.

    siunitx leaves out an uncertainty of zero unless told to keep it: 1.000 would read as if no interval were known. It
    parts five decimals, as in 1.000 49, unless told not to.
    """
    if not is_number(table, column.name):
        return "l"
    place = places(table, column)
    sems = errors(table, column)
    values = table.frame[column.name].dropna().astype(float)
    values = values[values.abs() < math.inf]
    deepest = max((places_of(float(sem), place) for sem in sems), default=place)
    whole = max((len(f"{abs(value):.{place}f}".split(".")[0]) for value in values), default=1)
    sign = "-" if (values < 0).any() else ""
    form = f"{sign}{whole}" + (f".{deepest}" if deepest else "")
    shown = [f"{sem:.{places_of(float(sem), place)}f}" for sem in sems]
    whole_digits = ", group-digits=none" if deepest > UNPARTED else ""
    if not column.interval:
        return f"S[table-format={form}{whole_digits}]"
    digits = max((len(sem.replace(".", "").lstrip("0")) for sem in shown), default=1)
    keep = ", retain-zero-uncertainty=true" if any(float(sem) == 0 for sem in shown) else ""
    return f"S[table-format={form}({max(1, digits)}), separate-uncertainty=true{keep}{whole_digits}]"


FORMAT = Format("latex", (".tex",), latex_table)
