"""Stable ranks by layer, pooled over heads and sequences (comparable to Lampert et al. 2605.08453, fig. 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES
from sinkscope.present.figures.several.kind import Kind, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    (axes,) = panels
    weights = series.rows("smoothing").groupby("layer")[["rank_w", "rank_qk"]].median()
    table = series.run.sequences
    own = (table["domain"] == series.data.domain) & (table["stream"] == series.stream) & table["head"].notna()
    pooled = table[own].groupby("layer")["rank_output"]
    low, quarter, middle, most, high = (pooled.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
    color = LINES[0]
    axes.fill_between(low.index, low, high, color=color, alpha=0.2, linewidth=0, label="5 to 95 %")
    axes.fill_between(low.index, quarter, most, color=color, alpha=0.35, linewidth=0, label="25 to 75 %")
    axes.plot(middle.index, middle, color=color, linewidth=1, marker="o", ms=2, label="outputs, median")
    axes.plot(weights.index, weights["rank_w"], color=LINES[5], linewidth=1, linestyle="--", label="$W_O W_V$")
    axes.plot(weights.index, weights["rank_qk"], color="black", linewidth=1, linestyle=":", label="$W_Q^T W_K$")
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=0.9)
    axes.yaxis.set_major_formatter("{x:g}")
    by_layer(axes)
    if named:
        axes.set_ylabel("stable rank")


KIND = Kind(
    "ranks", ("smoothing",), 1, 1.9, paint,
    "Stable rank of what heads write, by layer, pooled over heads and sequences: 1 means the same direction for every "
    "token. Bands hold 25 to 75 % and 5 to 95 % of the (head, sequence) pairs. Lines: median over the layer's heads of "
    "the stable ranks of the weights, W_O W_V and W_Q' W_K with the input norm's gain.",
)  # fmt: skip
