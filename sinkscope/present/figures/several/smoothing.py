"""What each head's mixing does to the cosine of tokens, coloured by the condition (Lampert et al., figs. 8-10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several.kind import Kind, beside_layers, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series

PARTS = (
    ("attention_minus_identity", "attention\n$-$ identity"),
    ("uniform_minus_attention", "uniform\n$-$ attention"),
    ("relative_change", "relative\nchange"),
)
VERDICTS = {
    "smooths": (LINES[0], "o", "full"),
    "sharpens": (LINES[5], "^", "full"),
    "neither": (CONTROL, "s", "none"),
}
"""Colour, marker and filling: the three differ in grey too."""
LINEAR = 1e-5
"""Values up to this are drawn on a linear scale, larger ones on a logarithmic one: where the norm of x has grown, a
head changes the cosine by a ten-thousandth of what it does in the first layers."""
TICKS = (-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1)


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    from matplotlib.ticker import FixedLocator

    rows = series.rows("smoothing")
    place = beside_layers(rows)
    for axes, (column, label) in zip(panels, PARTS, strict=True):
        axes.axhline(0, color="grey", linewidth=0.6)
        for verdict, (color, marker, filling) in VERDICTS.items():
            own = rows["verdict"] == verdict
            axes.errorbar(
                place[own], rows[column][own], rows[f"{column}_sem"][own], color=color, marker=marker, ms=2.5,
                fillstyle=filling, linestyle="", linewidth=0.5, markeredgewidth=0.6, label=verdict,
            )  # fmt: skip
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.minorticks_off()
        by_layer(axes)
        if named:
            axes.set_ylabel(label)


KIND = Kind(
    "smoothing", ("smoothing",), 3, 1.2, paint,
    "What each head's mixing does to the mean cosine of tokens, one mark a head. Attention - identity: the cosine "
    "under the head's own attention less that where each token attends to itself. Uniform - attention: that under "
    "uniform attention less that under the head's own. Relative change: the first difference over the cosine under "
    "identity. "
    "All scales are logarithmic beyond 1e-5. Circles: dense attention provably smooths more than sparse (beta tr(BW) > "
    "0); triangles: it sharpens (beta tr(BW) + tr(BW'W) < 0); squares: neither condition holds. Bars: standard error "
    "over sequences.",
)  # fmt: skip
