"""Figures over several runs that need the tables of questions alone: what one declares, and how it is drawn.

A question's module `figure` lists its figures in FIGURES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.canvas import Grid, drawn, legend_below
from sinkscope.present.figures.series import all_series, common, measured
from sinkscope.present.text import run_id
from sinkscope.runs.questions import QUESTIONS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.present.figures.series import Series
    from sinkscope.runs.run import Run

OFFSET = 0.35
"""Heads of a layer stand at most this far from the layer's place."""


@dataclass(frozen=True)
class TableFigure:
    """A figure over several runs.

    Attributes:
        tables: the tables of a run that it shows.
        parts: panels of each series.
        height: inches of a panel.
        paint: paints the panels of one series; told whether they stand at the left, where axes are named.
        caption: what it shows, and what its bands and bars are; plain text.
        legend_columns: entries of the legend beside each other, in a column.
        layers_below: whether layers are the horizontal axis of all parts.
    """

    name: str
    tables: tuple[str, ...]
    parts: int
    height: float
    paint: Callable[[Series, list[Axes], bool], None]
    caption: str
    legend_columns: int = 3
    layers_below: bool = True


@cache
def table_figures() -> dict[str, TableFigure]:
    """Every figure of every question, by name, in the order of the questions.

    Raises SinkscopeError where two questions have a figure of one name, and where one draws others than it declares.
    """
    figures: dict[str, TableFigure] = {}
    for question in QUESTIONS.values():
        own = {each.name: each for each in question.need("figure").FIGURES} if question.figures else {}
        if tuple(own) != question.figures or own.keys() & figures.keys():
            raise SinkscopeError(
                f"--measure {question.name}: it draws the figures {', '.join(own)} and declares "
                f"{', '.join(question.figures)}; names must agree, and no other question may have them"
            )
        figures |= own
    return figures


def by_layer(axes: Axes) -> None:
    """Names the horizontal axis: layers, at whole numbers. A single layer gets room of its own."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim((low + high - 1) / 2, (low + high + 1) / 2)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def beside_layers(rows: pd.DataFrame) -> pd.Series:
    """The horizontal place of each head: its layer's, with the heads of a layer beside each other."""
    last = int(rows["head"].max())
    return rows["layer"] + (OFFSET * (2 * rows["head"] / last - 1) if last else 0.0)


def draw_several(
    runs: list[Run], figure: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """`figure` (one of `table_figures`) of every domain of every run, as PNG, SVG or PDF, and its caption.

    `title`: replaces the figure's own; `none` leaves it out. Raises SinkscopeError for an unknown figure, format or
    size, where a run lacks the figure's table, and where matplotlib is not installed.
    """
    known = table_figures()
    if figure not in known:
        raise SinkscopeError(f"--figure {figure!r}: choose one of {', '.join(known)}")
    kind, series = known[figure], all_series(runs)
    for each in series:
        for table in kind.tables:
            each.rows(table)
    grid = Grid(tuple(each.label for each in series), kind.parts, size, kind.height, common(series))

    def paint(canvas: Figure) -> None:
        panels = grid.panels(canvas)
        for number, (each, own) in enumerate(zip(series, panels, strict=True)):
            kind.paint(each, own, grid.is_left(number))
        if kind.layers_below:
            grid.share_layers(panels)
        legend_below(canvas, [axes for own in panels for axes in own], kind.legend_columns * (1 + (size == "page")))

    content = drawn(paint, f"sinkscope {figure} of {ids(series)}", form, grid.inches, title)
    return content, f"{kind.caption} {measured(series)}"


def ids(series: list[Series]) -> str:
    """The ids of the runs, each once."""
    return "runs " + ", ".join(dict.fromkeys(run_id(each.run) for each in series))
