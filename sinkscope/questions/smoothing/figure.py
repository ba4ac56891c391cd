"""Figures of smoothing.csv: cosines by layer, what mixing does to them, stable ranks, and the cost of a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several import TableFigure, beside_layers, by_layer
from sinkscope.questions.smoothing.figure_heads import HEADS_FIGURES
from sinkscope.runs.per_sequence import cells
from sinkscope.runs.statistics import mean, sem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.several import Series

COSINES_OF_TOKENS = (
    ("avg_cos_residual", "$x$", LINES[0], "-", "o"),
    ("theory_residual", "$x$, theory", LINES[0], "--", ""),
    ("avg_cos_input", "$z$", LINES[1], "-", "s"),
    ("avg_cos_output", "$e$", LINES[2], "-", "^"),
)
COSINES_WRITTEN = (
    ("avgcos_identity", "$x + Wz$", LINES[5], "-", "o"),
    ("theory_identity", "$x + Wz$, theory", LINES[5], "--", ""),
    ("avgcos_attention", "$x + WAz$", LINES[4], "-", "s"),
    ("avgcos_uniform", "uniform $A$", CONTROL, ":", "^"),
)


def paint_cosine(series: Series, panels: list[Axes], named: bool) -> None:
    """How alike tokens are, by layer, beside what the theory predicts (Lampert et al. 2605.08453, figs. 2, 4-7)."""
    series.rows("smoothing")
    for axes, lines, label in zip(
        panels, (COSINES_OF_TOKENS, COSINES_WRITTEN), ("tokens", "tokens and a head"), strict=True
    ):
        curves = cells(series.run, series.data.domain, "layer", [line[0] for line in lines])
        here = (curves.places["stream"] == series.stream).to_numpy()
        layers, averages, errors = curves.places["layer"][here], mean(curves.values)[here], sem(curves.values)[here]
        for name, shown, color, style, marker in lines:
            if name not in curves.names:
                continue
            at = curves.names.index(name)
            values, error = averages[:, at], errors[:, at]
            axes.plot(layers, values, color=color, linestyle=style, marker=marker, ms=2, linewidth=1, label=shown)
            axes.fill_between(layers, values - error, values + error, color=color, alpha=0.25, linewidth=0)
        if not axes.lines:
            raise SinkscopeError(f"{series.label}: no cosine of {label} was measured")
        shared = axes.get_shared_y_axes().get_siblings(axes)
        lowest = np.nanmin([np.nanmin(line.get_ydata()) for sibling in shared for line in sibling.lines])
        axes.set_ylim(min(0.0, float(lowest)), 1.02)
        by_layer(axes)
        if named:
            axes.set_ylabel("mean cosine")


COSINE = TableFigure(
    "cosine", ("smoothing",), 2, 1.6, paint_cosine,
    "Mean cosine of two different tokens i, j >= 1, by layer. First panel: x, the residual stream entering the block, "
    "z, its normalised form that the projections read, and e, the stream leaving the block. Second panel: x with what "
    "one head would add to it, mean over the layer's heads: x + Wz where each token attends to itself, x + WAz with "
    "the head's own attention A, and with uniform attention. Dashed: the theory (eq. 2, our reconstruction). "
    "Lines coincide where a head adds little to x; a line ends where its quantity is missing. Bands: standard error "
    "over sequences.",
    legend_columns=3,
)  # fmt: skip


CHANGES = (
    ("attention_minus_identity", "attention\n$-$ identity"),
    ("uniform_minus_attention", "uniform\n$-$ attention"),
    ("relative_change", "relative\nchange"),
)
MARKS = {
    "smooths": (LINES[0], "o", "full"),
    "sharpens": (LINES[5], "^", "full"),
    "neither": (CONTROL, "s", "none"),
}
"""Colour, marker and filling: the three differ in grey too."""
LINEAR = 1e-5
"""Values up to this are drawn on a linear scale, larger ones on a logarithmic one: where the norm of x has grown, a
head changes the cosine by a ten-thousandth of what it does in the first layers."""
TICKS = (-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1)


def paint_smoothing(series: Series, panels: list[Axes], named: bool) -> None:
    """What each head's mixing does to the cosine of tokens, coloured by the condition (Lampert et al., figs. 8-10)."""
    from matplotlib.ticker import FixedLocator

    rows = series.rows("smoothing")
    place = beside_layers(rows)
    for axes, (column, label) in zip(panels, CHANGES, strict=True):
        axes.axhline(0, color="grey", linewidth=0.6)
        for verdict, (color, marker, filling) in MARKS.items():
            here = rows["verdict"] == verdict
            axes.errorbar(
                place[here], rows[column][here], rows[f"{column}_sem"][here], color=color, marker=marker, ms=2,
                fillstyle=filling, linestyle="", linewidth=0.5, markeredgewidth=0.5, alpha=0.7, label=verdict,
            )  # fmt: skip
        middle = rows.groupby("layer")[column].median()
        axes.hlines(middle, middle.index - 0.4, middle.index + 0.4, color="black", linewidth=0.8, label="median")
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.minorticks_off()
        by_layer(axes)
        if named:
            axes.set_ylabel(label)


SMOOTHING = TableFigure(
    "smoothing", ("smoothing",), 3, 1.2, paint_smoothing,
    "What each head's mixing does to the mean cosine of tokens, one mark a head. Attention - identity: the cosine "
    "under the head's own attention less that where each token attends to itself. Uniform - attention: that under "
    "uniform attention less that under the head's own. Relative change: the first difference over the cosine under "
    "identity. All scales are logarithmic beyond 1e-5. Black bars: median over the layer's heads. Circles: dense "
    "attention provably smooths more than sparse (beta tr(BW) > 0); triangles: it sharpens (beta tr(BW) + tr(BW'W) < "
    "0); squares: neither condition holds. Vertical bars: standard error over sequences.",
)  # fmt: skip


def paint_ranks(series: Series, panels: list[Axes], named: bool) -> None:
    """Stable ranks by layer, pooled over heads and sequences (comparable to Lampert et al. 2605.08453, fig. 12)."""
    (axes,) = panels
    weights = series.rows("smoothing").groupby("layer")[["rank_w", "rank_qk"]].median()
    table = series.run.sequences
    here = (table["domain"] == series.data.domain) & (table["stream"] == series.stream) & table["head"].notna()
    pooled = table[here].groupby("layer")["rank_output"]
    low, quarter, middle, most, high = (pooled.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
    color = LINES[0]
    axes.fill_between(low.index, low, high, color=color, alpha=0.2, linewidth=0, label="5 to 95 %")
    axes.fill_between(low.index, quarter, most, color=color, alpha=0.35, linewidth=0, label="25 to 75 %")
    axes.plot(middle.index, middle, color=color, linewidth=1, marker="o", ms=2, label="outputs, median")
    axes.plot(weights.index, weights["rank_w"], color=LINES[5], linewidth=1, linestyle="--", label="$W_O W_V$")
    axes.plot(weights.index, weights["rank_qk"], color="black", linewidth=1, linestyle=":", label="$W_Q^T W_K$")
    axes.set_yscale("log", base=2)
    axes.autoscale(axis="y")  # all series share the axis
    axes.set_ylim(bottom=0.9)
    axes.yaxis.set_major_formatter("{x:g}")
    by_layer(axes)
    if named:
        axes.set_ylabel("stable rank")


RANKS = TableFigure(
    "ranks", ("smoothing",), 1, 1.9, paint_ranks,
    "Stable rank of what heads write, by layer, pooled over heads and sequences: 1 means the same direction for every "
    "token. Bands hold 25 to 75 % and 5 to 95 % of the (head, sequence) pairs. Lines: median over the layer's heads of "
    "the stable ranks of the weights, W_O W_V and W_Q' W_K with the input norm's gain.",
)  # fmt: skip


COST_MARKS = (
    ("cost_sink_upper_qk", LINES[0], "o", "full", "sink, at most"),
    ("cost_sink_lower_qk", LINES[0], "o", "none", "sink, at least"),
    ("cost_diagonal_upper_qk", LINES[5], "^", "full", "diagonal, at most"),
    ("cost_diagonal_lower_qk", LINES[5], "v", "none", "diagonal, at least"),
    ("cost_qk", "black", ".", "full", "the head's own"),
)
"""Column, colour, marker, filling and name of each bound."""


def lacks_costs(series: Series) -> str:
    """Why no head of the series has a cost; empty where one has."""
    rows = series.rows("smoothing")
    if "cost_sink_upper_qk" not in rows:
        return "an older sinkscope wrote this run; scan again for costs in parts"
    if rows["cost_sink_upper_qk"].isna().all():
        return (
            "no head's first token leads every other key in the sequences that costs were measured on (--spectra), so "
            "that no cost is known"
        )
    return ""


def paint_costs(series: Series, panels: list[Axes], named: bool) -> None:
    """What a sink costs against a diagonal pattern, head by head (Lampert et al. 2605.08453, section 7; its figure 3
    shows whole blocks)."""
    from matplotlib.ticker import MaxNLocator

    (axes,) = panels
    rows = series.rows("smoothing")
    rows = rows[rows["cost_sink_upper_qk"].notna()].sort_values("cost_sink_upper_qk", kind="stable")
    place = np.arange(1, len(rows) + 1)
    axes.fill_between(
        place, rows["cost_sink_lower_qk"], rows["cost_sink_upper_qk"], color=LINES[0], alpha=0.15, linewidth=0
    )
    for name, color, marker, filling, label in COST_MARKS:
        if rows[name].notna().any():
            axes.plot(
                place, rows[name], color=color, marker=marker, ms=2, linestyle="", fillstyle=filling,
                markeredgewidth=0.5, label=label,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlim(1 - max(0.5, 0.04 * len(rows)), len(rows) + max(0.5, 0.04 * len(rows)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))
    axes.set_xlabel(f"{len(rows)} head{'s' if len(rows) > 1 else ''}")
    if named:
        axes.set_ylabel("cost of $W_Q, W_K$")


COSTS = TableFigure(
    "costs", ("smoothing",), 1, 1.9, paint_costs,
    "Bounds on what queries and keys of a sink cost, and those of a diagonal pattern, with the head's own margin over "
    "each other key: |W_Q|^2 + |W_K|^2, one place a head, ordered by the sink's upper bound. Heads whose first token "
    "leads in no sequence have no cost and are left out; so is the diagonal's upper bound where two tokens are too "
    "near for one. Values and MLP, for which the paper's upper bounds have terms and its lower bounds none, are not "
    "drawn. The diagonal's lower bound is ours; the paper's is half of it and a term for the first token.",
    legend_columns=2, layers_below=False, lacks=lacks_costs,
)  # fmt: skip


FIGURES = (COSINE, SMOOTHING, RANKS, COSTS, *HEADS_FIGURES)
