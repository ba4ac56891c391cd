"""Draws a figure over several runs, and says in its caption what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.canvas import drawn
from sinkscope.present.figures.grid import Grid, legend_below
from sinkscope.present.figures.series import all_series, common, measured
from sinkscope.present.figures.several import alignment, cosine, costs, ranks, smoothing, switch
from sinkscope.present.identity import run_id

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sinkscope.present.figures.series import Series
    from sinkscope.runs.run import Run

KINDS = {each.KIND.name: each.KIND for each in (alignment, cosine, smoothing, ranks, costs, switch)}
"""Every figure over several runs that needs their tables alone."""


def draw_several(
    runs: list[Run], figure: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """`figure` (one of KINDS) of every domain of every run, as PNG, SVG or PDF, and its caption.

    `title`: replaces the figure's own; `none` leaves it out. Raises SinkscopeError for an unknown figure, format or
    size, where a run lacks the figure's table, and where matplotlib is not installed.
    """
    if figure not in KINDS:
        raise SinkscopeError(f"--figure {figure!r}: choose one of {', '.join(KINDS)}")
    kind, series = KINDS[figure], all_series(runs)
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
