"""How alike tokens are, layer by layer, beside what the theory predicts (Lampert et al. 2605.08453, figs. 2, 4-7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several.kind import Kind, by_layer
from sinkscope.runs.averages import mean, sem
from sinkscope.runs.per_sequence import cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series

TOKENS = (
    ("avg_cos_residual", "$x$", LINES[0], "-", "o"),
    ("theory_residual", "$x$, theory", LINES[0], "--", ""),
    ("avg_cos_input", "$z$", LINES[1], "-", "s"),
    ("avg_cos_output", "$e$", LINES[2], "-", "^"),
)
WRITTEN = (
    ("avgcos_identity", "$x + Wz$", LINES[5], "-", "o"),
    ("theory_identity", "$x + Wz$, theory", LINES[5], "--", ""),
    ("avgcos_attention", "$x + WAz$", LINES[4], "-", "s"),
    ("avgcos_uniform", "uniform $A$", CONTROL, ":", "^"),
)


def paint(series: Series, panels: list[Axes], named: bool) -> None:
    series.rows("smoothing")
    for axes, lines, label in zip(panels, (TOKENS, WRITTEN), ("tokens", "tokens and a head"), strict=True):
        found = cells(series.run, series.data.domain, "layer", [line[0] for line in lines])
        own = (found.places["stream"] == series.stream).to_numpy()
        layers, averages, errors = found.places["layer"][own], mean(found.values)[own], sem(found.values)[own]
        for name, shown, color, style, marker in lines:
            if name not in found.names:
                continue
            at = found.names.index(name)
            values, error = averages[:, at], errors[:, at]
            axes.plot(layers, values, color=color, linestyle=style, marker=marker, ms=2, linewidth=1, label=shown)
            axes.fill_between(layers, values - error, values + error, color=color, alpha=0.25, linewidth=0)
        if not axes.lines:
            raise SinkscopeError(f"{series.label}: no cosine of {label} was measured")
        axes.set_ylim(min(0.0, float(np.nanmin([np.nanmin(line.get_ydata()) for line in axes.lines]))), 1.02)
        by_layer(axes)
        if named:
            axes.set_ylabel("mean cosine")


KIND = Kind(
    "cosine", ("smoothing",), 2, 1.6, paint,
    "Mean cosine of two different tokens i, j >= 1, by layer. First panel: x, the residual stream entering the block, "
    "z, its normalised form that the projections read, and e, the stream leaving the block. Second panel: x with what "
    "one head would add to it, mean over the layer's heads: x + Wz where each token attends to itself, x + WAz with "
    "the head's own attention A, and with uniform attention. Dashed: the theory (eq. 2, our reconstruction). Bands: "
    "standard error over sequences.",
    legend_columns=3,
)  # fmt: skip
