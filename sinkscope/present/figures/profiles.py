"""Profiles of several runs on one set of axes: by layer, or by relative depth where the numbers of layers differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from sinkscope.comparison.levels import relative_depths
from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import drawn, fitting, headline, inches, need_finite, plain_axis
from sinkscope.present.figures.several import Series, all_series, by_layer, common, measured
from sinkscope.present.paper.cells import in_words, mathematics
from sinkscope.present.text import run_id, sentence
from sinkscope.runs.words import first_mass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.runs.run import Run

COLUMNS = ("mean_bos_mass", "cos_first_residual", "norm_ratio")
"""Columns of layers.csv that a profile shows, one panel each."""
STYLES = ("-", "--", ":")
MOST = len(LINES) * len(STYLES)
"""Most lines that can be told apart."""
CHARACTERS = 12
"""Characters of the legend's letters to an inch."""


def draw_profiles(
    runs: list[Run], form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:  # fmt: skip
    """The profiles of every domain of every run, a line each, as PNG, SVG or PDF, and the caption.

    `title`: replaces the figure's own; `none` leaves it out. Raises SinkscopeError for more lines than can be told
    apart, an unknown format or size, and where matplotlib is not installed.
    """
    series = all_series(runs)
    if len(series) > MOST:
        raise SinkscopeError(f"{len(series)} profiles cannot be told apart on one set of axes: draw at most {MOST}")
    over_depth = len({len(line.rows("layers")) for line in series}) > 1
    width = inches(size, 1)[0]
    columns = 2 if size == "page" else 1
    height = 1.1 + 1.25 * len(COLUMNS) + 0.17 * -(-len(series) // columns)

    def paint(canvas: Figure) -> None:
        panels = canvas.subplots(len(COLUMNS), 1, sharex=True)
        for axes, name in zip(panels, COLUMNS, strict=True):
            _panel(axes, name, series, over_depth)
        if over_depth:
            panels[-1].set_xlabel("relative depth (0: first layer, 1: last)")
        else:
            by_layer(panels[-1])
        if common(series):
            headline(canvas, fitting(common(series), width))
        handles, labels = panels[0].get_legend_handles_labels()
        room = (width - 0.6 * columns) / columns
        names = [fitting(label, room) for label in labels]
        canvas.legend(handles, names, frameon=False, ncols=columns, loc="outside lower center")

    about = "sinkscope profile of runs " + ", ".join(dict.fromkeys(run_id(run) for run in runs))
    return drawn(paint, about, form, (width, height), title), _caption(series, over_depth)


def _panel(axes: Axes, name: str, series: Sequence[Series], over_depth: bool) -> None:
    looks = cycle([(color, style) for style in STYLES for color in LINES])
    for line, (color, style) in zip(series, looks, strict=False):
        rows = line.rows("layers")
        need_finite(rows, (name, f"{name}_sem"), "profile")
        x: Any = relative_depths(len(rows)) if over_depth else rows["layer"]
        axes.plot(
            x, rows[name], color=color, linestyle=style, marker="o", markersize=1.5, linewidth=1, label=line.label
        )
        error = rows.get(f"{name}_sem")
        if error is not None:
            axes.fill_between(x, rows[name] - error, rows[name] + error, color=color, alpha=0.2, linewidth=0)
    axes.set_ylabel(mathematics(name) or in_words(name, _mass(series)))
    plain_axis(axes, name == "norm_ratio" and any((line.rows("layers")[name] > 0).any() for line in series))


def _mass(series: Sequence[Series]) -> str:
    return first_mass(*(line.run.summary.first_token for line in series))


def _caption(series: list[Series], over_depth: bool) -> str:
    across = (
        "over relative depth: the first layer with attention has 0, the last 1, the others equal steps between"
        if over_depth
        else "by layer"
    )
    return (
        f"{sentence(_mass(series))}, alignment and norm of the first token, {across}: mean attention of queries 1.. on "
        "the first token over the layer's heads, mean cosine of the first token's residual stream with that of every "
        "other token, and its norm over theirs. Bands: standard error over sequences. "
        f"{measured(series)}"
    )
