"""Is a sink a switch? Rows on the first token against rows in which the head writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several.kind import Kind, beside_layers, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series

SILENT = 0.05
"""A head below this communication moves nothing between tokens."""


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    from matplotlib.ticker import MultipleLocator

    rows = series.rows("switch")
    scatter, moved = panels
    silent = rows["communication"] < SILENT
    groups = (
        (~silent, LINES[0], "o", "full", "moves something between tokens"),
        (silent, LINES[5], "^", "none", "communication below 5 %"),
    )
    scatter.plot([0, 1], [0, 1], color=CONTROL, linestyle="--", linewidth=0.8, label="off exactly as often as sunk")
    moved.axhline(SILENT, color=CONTROL, linestyle=":", linewidth=0.8)
    place = beside_layers(rows)
    for chosen, color, marker, filling, label in groups:
        if not chosen.any():
            continue
        for axes, x, y in (
            (scatter, rows["sink_rows"], rows["off_rate"]),
            (moved, place, rows["communication"]),
        ):
            axes.plot(
                x[chosen], y[chosen], color=color, marker=marker, ms=2.5, fillstyle=filling, linestyle="",
                markeredgewidth=0.6, label=label,
            )  # fmt: skip
    scatter.set(xlabel="sink rows", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), box_aspect=1)
    moved.set_ylim(0, max(moved.get_ylim()[1], 1.05 * rows["communication"].max()))  # all series share the axis
    for axes in panels:  # labels that change with the panel's size would be cut off at the left edge
        axes.yaxis.set_major_locator(MultipleLocator(0.5))
    by_layer(moved)
    if named:
        scatter.set_ylabel("off rows")
        moved.set_ylabel("communication")


KIND = Kind(
    "switch", ("switch",), 2, 1.7, paint,
    "Is a sink a switch? One mark a head. First panel: the share of rows that give the first token 0.9 or more (sink "
    "rows) against the share in which the head writes less than a tenth of a value (off rows); on the dashed line a "
    "head is off as often as it sinks. Second panel: the energy that a head moves between tokens, over all that it "
    "writes; the dotted line is at 5 %.",
    legend_columns=1, layers_below=False,
)  # fmt: skip
