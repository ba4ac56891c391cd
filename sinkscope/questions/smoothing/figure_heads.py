"""Figures of smoothing.csv that choose heads: those near to uniform attention, the theory's error, single heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.several import TableFigure, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkscope.present.figures.several import Series

UNIFORM = 0.6
"""Heads above this mean uniformity have the second panel of `parts`."""
PARTS = (
    ("avgcos_residual", "$x$", LINES[0], "-", "o"),
    ("avgcos_identity", "$x + Wz$", LINES[5], "-", "s"),
    ("avgcos_attention", "$x + WAz$", LINES[4], "--", "^"),
    ("avgcos_uniform", "uniform $A$", CONTROL, ":", "v"),
)
MIXES = PARTS[1:]
"""What a head adds under identity, its own and uniform attention."""
ERRORS = (
    ("residual", "$x$", LINES[0], "o"),
    ("identity", "$x + Wz$", LINES[5], "s"),
)
EACH = 2
"""Heads of each condition that `selected` shows."""


def paint_parts(series: Series, panels: list[Axes], named: bool) -> None:
    """Parts of the attention step over all heads and over uniform ones (Lampert et al. 2605.08453, fig. 2 right)."""
    rows = _sequences(series, [name for name, *_ in PARTS])
    uniform = rows.groupby(["module", "head"])["uniformity"].transform("mean") > UNIFORM
    layers = sorted(rows["layer"].unique())
    for axes, subset, told in zip(
        panels, (rows, rows[uniform]), ("all heads", f"uniformity > {UNIFORM:g}"), strict=True
    ):
        for name, label, color, style, marker in PARTS:
            if subset[name].notna().any():
                _line(
                    axes, subset, name, layers, {"color": color, "linestyle": style, "marker": marker, "label": label}
                )
        if not axes.lines:
            axes.text(0.5, 0.5, "no head", transform=axes.transAxes, ha="center", va="center", color=CONTROL)
        axes.autoscale(axis="y")  # all series share the axis
        axes.set(xlim=(min(layers) - 0.5, max(layers) + 0.5), ylim=(min(0.0, axes.get_ylim()[0]), 1.02))
        by_layer(axes)
        if named:
            axes.set_ylabel(f"mean cosine\n{told}")


def paint_theory(series: Series, panels: list[Axes], named: bool) -> None:
    """How far the theory is from the measured cosine (Lampert et al. 2605.08453, fig. 7)."""
    (axes,) = panels
    rows = _sequences(series, [f"{kind}_{of}" for of, *_ in ERRORS for kind in ("avgcos", "theory")])
    layers = sorted(rows["layer"].unique())
    for of, label, color, marker in ERRORS:
        rows["error"] = (rows[f"avgcos_{of}"] - rows[f"theory_{of}"]).abs()
        if rows["error"].notna().any():
            _line(axes, rows, "error", layers, {"color": color, "marker": marker, "label": label})
    if not axes.lines:
        raise SinkscopeError(f"{series.label}: no theoretical cosine was measured")
    axes.autoscale(axis="y")  # all series share the axis
    axes.set_ylim(bottom=0)
    by_layer(axes)
    if named:
        axes.set_ylabel("|measured\n$-$ theory|")


def paint_selected(series: Series, panels: list[Axes], named: bool) -> None:
    """The cosine of tokens under three mixes, for single heads (Lampert et al. 2605.08453, fig. 11)."""
    (axes,) = panels
    rows = selected(series.rows("smoothing"))
    if rows.empty:
        raise SinkscopeError(f"{series.label}: no head has a condition and a cosine under uniform attention")
    for number, (name, label, color, _, marker) in enumerate(MIXES):
        place = np.arange(len(rows)) + 0.15 * (number - 1)
        axes.errorbar(
            place, rows[name], rows[f"{name}_sem"], color=color, marker=marker, ms=3, linestyle="", linewidth=0.6,
            label=label,
        )  # fmt: skip
    axes.set_xticks(range(len(rows)), [f"{row.layer}.{row.head}" for row in rows.itertuples()])
    middles = rows.reset_index().groupby("verdict", sort=False)["index"].mean()
    axes.xaxis.remove_overlapping_locs = False  # the only head of a condition stands at its middle
    axes.set_xticks(middles, middles.index, minor=True)
    axes.tick_params(axis="x", labelsize=5, length=0)
    axes.tick_params(axis="x", which="minor", labelsize=5, length=0, pad=9)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("layer.head")
    if named:
        axes.set_ylabel("mean cosine")


def selected(table: pd.DataFrame) -> pd.DataFrame:
    """Of each condition the heads whose own attention is farthest from uniform attention in what it does to cosines."""
    heads = table[table["verdict"].notna() & table["uniform_minus_attention"].notna()]
    far = heads.assign(far=heads["uniform_minus_attention"].abs()).sort_values("far", ascending=False, kind="stable")
    parts = [far[far["verdict"] == name].head(EACH) for name in ("smooths", "sharpens", "neither")]
    return pd.concat(parts, ignore_index=True)


def _sequences(series: Series, names: list[str]) -> pd.DataFrame:
    """One row for each sequence and head, with these columns and uniformity; missing ones are NaN.

    Raises SinkscopeError where the run lacks the table.
    """
    series.rows("smoothing")
    table = series.run.sequences
    here = (table["domain"] == series.data.domain) & (table["stream"] == series.stream) & table["head"].notna()
    return table[here].reindex(columns=["sequence", "layer", "module", "head", "uniformity", *names])


def _line(axes: Axes, rows: pd.DataFrame, name: str, layers: list[int], style: dict[str, str]) -> None:
    """Means over a layer's heads, then over sequences, with a band of their standard error."""
    curve = rows.groupby(["sequence", "layer"])[name].mean().groupby("layer").agg(["mean", "sem"]).reindex(layers)
    axes.plot(layers, curve["mean"], ms=2, linewidth=1, **style)  # type: ignore[arg-type]
    low, high = curve["mean"] - curve["sem"], curve["mean"] + curve["sem"]
    axes.fill_between(layers, low, high, color=style["color"], alpha=0.25, linewidth=0)


HEADS_FIGURES = (
    TableFigure(
        "parts", ("smoothing",), 2, 1.6, paint_parts,
        "Mean cosine of two different tokens i, j >= 1, by layer: x, the residual stream entering the block, and x "
        "with what one head adds to it where each token attends to itself (x + Wz), with the head's own attention (x + "
        "WAz) and with uniform attention. First panel: mean over all heads of the layer; second panel: over its heads "
        f"of a mean uniformity above {UNIFORM:g}, and no mark where it has none. Uniformity is ours: the entropy of a "
        "row over that of a uniform one. Bands: standard error over sequences.",
        legend_columns=2,
    ),
    TableFigure(
        "theory", ("smoothing",), 1, 1.6, paint_theory,
        "Absolute difference between the measured mean cosine of two tokens and the theory (eq. 2, our reconstruction) "
        "by layer, of x, the residual stream entering the block, and of x + Wz, where each token attends to itself: a "
        "difference for each head and sequence, mean over both. Bands: standard error over sequences.",
    ),
    TableFigure(
        "selected", ("smoothing",), 1, 1.6, paint_selected,
        "Mean cosine of two different tokens i, j >= 1 of x with what one head adds to it, for single heads: where "
        "each token attends to itself (x + Wz), with the head's own attention (x + WAz) and with uniform attention. "
        f"The heads are the {EACH} of each condition whose own attention is farthest from uniform attention here; the "
        "condition stands below them. Bars: standard error over sequences.",
        layers_below=False,
    ),
)  # fmt: skip
