"""How aligned the sink's embedding is with every other (Lampert et al. 2605.08453, fig. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES
from sinkscope.present.figures.several.kind import Kind, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series

PARTS = (
    ("cos_residual", r"$\cos(x_0, x_j)$"),
    ("cos_input", r"$\cos(z_0, z_j)$"),
)


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    rows = series.rows("alignment")
    rows = rows[rows["position"] > 0]
    for axes, (column, label), color in zip(panels, PARTS, LINES, strict=False):
        cosines = rows.groupby("layer")[column]
        low, middle, high = (cosines.quantile(share) for share in (0.05, 0.5, 0.95))
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.fill_between(
            low.index, cosines.min(), cosines.max(), color=color, alpha=0.2, linewidth=0, label="all positions"
        )
        axes.fill_between(low.index, low, high, color=color, alpha=0.35, linewidth=0, label="5 to 95 % of positions")
        axes.plot(middle.index, middle, color="black", linewidth=1, label="median position")
        axes.plot(cosines.mean().index, cosines.mean(), color=color, linewidth=1, linestyle="--", label="mean")
        axes.set_ylim(top=1.02)
        by_layer(axes)
        if named:
            axes.set_ylabel(label)


KIND = Kind(
    "alignment", ("alignment",), 2, 1.6, paint,
    "Cosine of the first token's embedding with that of every other token j, by layer: in the residual stream x that "
    "enters the block, and in z, which the query, key and value projections read. The cosine at a position is a mean "
    "over sequences; bands hold 5 to 95 % of the positions j >= 1, and all of them.",
    legend_columns=2,
)  # fmt: skip
