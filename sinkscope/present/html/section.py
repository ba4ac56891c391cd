"""A question's part of the report: a heading, a hint on how to read it, and charts.

A question's module `section` has a function `section(run, dense)` that returns a `Section`, or None where the run holds
nothing to show. `dense`: the charts are of many heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.present.colors import CIVIDIS, mixed
from sinkscope.present.html.svg import Dot, legend, scatter
from sinkscope.runs.questions import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sinkscope.runs.questions import Question
    from sinkscope.runs.run import Run


@dataclass(frozen=True)
class Section:
    """What the report shows of one question.

    Attributes:
        title: the heading.
        hint: how the charts are read; plain text.
        charts: each a `caption`, an `svg`, the `points` that the page's script reads, and a `legend`, as `head_scatter`
            makes them.
    """

    title: str
    hint: str
    charts: list[dict[str, Any]]


def sections(run: Run, dense: bool) -> list[Section]:
    """The sections of all questions that the run holds an answer to, in the order of the questions."""
    answers = [_section(question, run, dense) for question in QUESTIONS.values()]
    return [section for section in answers if section is not None]


def _section(question: Question, run: Run, dense: bool) -> Section | None:
    module = question.part("section")
    if module is None:
        return None
    with QUESTIONS.blaming(question.name):
        answer: object = module.section(run, dense)
        if not isinstance(answer, Section | None):
            raise TypeError(f"section() returns {type(answer).__name__}; a Section or None is needed")
        return answer


def groups(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows by (stream, domain), each with a caption that is empty where there is only one."""
    keys = [key for key in ("stream", "domain") if key in table and table[key].nunique() > 1]
    if not keys:
        return [("", table)]
    return [(", ".join(map(str, name)), rows) for name, rows in table.groupby(keys, sort=False)]


def head_scatter(
    table: pd.DataFrame, x: str, y: str, labels: tuple[str, str], told: Callable[[dict[Hashable, Any]], str],
    dense: bool, marked: str | None = None, reach: tuple[float, float] = (0.0, 0.0),
) -> list[dict[str, Any]]:  # fmt: skip
    """One chart for each stream and domain, one dot a head, coloured by its layer.

    Args:
        x, y: the columns of the axes. labels: what the axes show, with the unit.
        told: what a dot says of its row.
        marked: a column of bool; its heads are circled.
        reach: what the axes span at least, from 0: charts of one reach have one scale.
    """
    charts = []
    for caption, rows in groups(table):
        top = float(rows["layer"].max())
        dots = [
            Dot(row[x], row[y], mixed(CIVIDIS, float(row["layer"]) / max(top, 1.0)), told(row),
                marked is not None and row[marked] is True)
            for row in rows.to_dict("records")
        ]  # fmt: skip
        chart, points = scatter(dots, *labels, dense, reach)
        charts.append({"caption": caption, "svg": chart, "points": points, "legend": legend((0, top), "layer")})
    return charts
