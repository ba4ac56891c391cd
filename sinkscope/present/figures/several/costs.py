"""What a sink costs against a diagonal pattern, head by head (Lampert et al. 2605.08453, fig. 3 and section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import LINES
from sinkscope.present.figures.several.kind import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    (axes,) = panels
    rows = series.rows("smoothing")
    rows = rows[rows["cost_sink_upper"].notna()].sort_values("cost_sink_upper", kind="stable")
    if rows.empty:
        raise SinkscopeError(
            f"{series.label}: no head has a sink margin above 0 in the sequences that costs were measured on "
            "(--spectra), so that no cost is known"
        )
    place = np.arange(1, len(rows) + 1)
    low, high = rows["cost_sink_lower"], rows["cost_sink_upper"]
    axes.fill_between(place, low, high, color=LINES[0], alpha=0.15, linewidth=0)
    axes.plot(place, high, color=LINES[0], marker="o", ms=2, linestyle="", label="sink, at most")
    axes.plot(
        place, low, color=LINES[0], marker="o", ms=2, linestyle="", fillstyle="none", markeredgewidth=0.5,
        label="sink, at least",
    )  # fmt: skip
    axes.plot(
        place, rows["cost_diagonal_upper"], color=LINES[5], marker="^", ms=2, linestyle="", label="diagonal, at most"
    )
    if "cost_diagonal_lower" in rows:
        axes.plot(
            place, rows["cost_diagonal_lower"], color=LINES[5], marker="v", ms=2, linestyle="", fillstyle="none",
            markeredgewidth=0.5, label="diagonal, at least",
        )  # fmt: skip
    if "cost_actual" in rows and rows["cost_actual"].notna().any():
        axes.plot(place, rows["cost_actual"], color="black", marker=".", ms=2, linestyle="", label="the head's own")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlabel(f"{len(rows)} heads")
    if named:
        axes.set_ylabel("cost")


KIND = Kind(
    "costs", ("smoothing",), 1, 1.9, paint,
    "Bounds on the cost of a sink and of a diagonal pattern with the head's own margin, one place a head, ordered by "
    "the sink's upper bound; heads whose margin is not above 0 have no cost and are left out. The diagonal's upper "
    "bound takes the mean gap between tokens where the theorem takes the smallest: an estimate, no guarantee.",
    legend_columns=2,
)  # fmt: skip
