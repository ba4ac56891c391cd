"""Figures of alignment.parquet and switch.csv: how the sink lies to all tokens, and whether it is a switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several import TableFigure, beside_layers, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.several import Series

COSINES = (
    ("cos_residual", r"$\cos(x_0, x_j)$"),
    ("cos_input", r"$\cos(z_0, z_j)$"),
)


def paint_alignment(series: Series, panels: list[Axes], named: bool) -> None:
    """How aligned the sink's embedding is with every other (Lampert et al. 2605.08453, fig. 1)."""
    rows = series.rows("alignment")
    rows = rows[rows["position"] > 0]
    for axes, (column, label), color in zip(panels, COSINES, LINES, strict=False):
        cosines = rows.groupby("layer")[column]
        low, middle, high = (cosines.quantile(share) for share in (0.05, 0.5, 0.95))
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.fill_between(
            low.index, cosines.min(), cosines.max(), color=color, alpha=0.2, linewidth=0, label="all positions"
        )
        axes.fill_between(low.index, low, high, color=color, alpha=0.35, linewidth=0, label="5 to 95 % of positions")
        mark = "." if len(middle) == 1 else "None"  # a line through a single layer would be no ink
        axes.plot(middle.index, middle, color="black", linewidth=1, marker=mark, label="median position")
        axes.plot(
            middle.index, cosines.mean(), color=color, linewidth=1, linestyle="--", marker=mark, ms=3, label="mean"
        )
        axes.autoscale(axis="y")  # a bound that another series has set would hide what lies beyond it
        axes.set_ylim(top=1.02)
        by_layer(axes)
        if named:
            axes.set_ylabel(label)


ALIGNMENT = TableFigure(
    "alignment", ("alignment",), 2, 1.6, paint_alignment,
    "Cosine of the first token's embedding with that of every other token j, by layer: in the residual stream x that "
    "enters the block, and in z, which the query, key and value projections read. The cosine at a position is a mean "
    "over sequences; bands hold 5 to 95 % of the positions j >= 1, and all of them.",
    legend_columns=2,
)  # fmt: skip


SILENT = 0.05
"""A head below this communication moves nothing between tokens."""


def paint_switch(series: Series, panels: list[Axes], named: bool) -> None:
    """Is a sink a switch? Rows on the first token against rows in which the head writes nothing."""
    from matplotlib.ticker import MultipleLocator

    rows = series.rows("switch")
    scatter, moved = panels
    silent = rows["communication"] < SILENT
    groups = (
        (~silent, LINES[0], "o", "full", "moves something between tokens"),
        (silent, LINES[5], "^", "none", "communication below 5 %"),
    )
    scatter.plot(
        [0, 1], [0, 1], color=CONTROL, linestyle="--", linewidth=0.8, label="off exactly as often as on the sink"
    )
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


SWITCH = TableFigure(
    "switch", ("switch",), 2, 1.7, paint_switch,
    "Is a sink a switch? One mark a head. First panel: the share of rows that give the first token 0.9 or more (sink "
    "rows) against the share in which the head writes less than a tenth of a value (off rows); on the dashed line a "
    "head is off as often as it sinks. Second panel: the energy that a head moves between tokens, over the "
    "energy of its whole output; it may exceed 1, where other parts cancel it. The dotted line is at 5 %.",
    legend_columns=1, layers_below=False,
)  # fmt: skip


FIGURES = (ALIGNMENT, SWITCH)
