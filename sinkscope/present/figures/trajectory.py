"""The figure of trainings: the sink score of every head, and the mean of all, at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import Grid, drawn, inches
from sinkscope.present.text import printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 5
"""Heads that the legend names: those with the largest sink score at the last step."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""A line style for each named head, which tells it apart in grey too."""
CAPTION = (
    "Sink score alpha_0 of every head over training. Coloured: the heads with the largest score at the last step, with "
    "bands of their standard error over sequences; grey: all others; black: the mean of all heads."
)


def draw_trajectory(
    trajectory: pd.DataFrame, form: str, size: str = "column", losses: pd.DataFrame | None = None,
    title: str | None = None,
) -> bytes:  # fmt: skip
    """alpha_0 of each head of the first domain and stream against training steps, with bands of its standard error.

    The strongest heads at the last step have colours and names, all others are grey. The black line is the mean.
    `losses`, columns step and loss, are drawn above it over the same steps.
    """

    def paint(canvas: Figure) -> None:
        _paint(canvas.subplots() if losses is None else _below_the_loss(canvas, losses), trajectory)
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    return drawn(paint, "sinkscope trajectory", form, inches(size, 0.95 if losses is None else 1.25), title)


def draw_trajectories(
    named: dict[str, pd.DataFrame], form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """The same of several trainings, by name, each in a panel of its own; the figure and its caption."""
    if len(named) == 1:
        return draw_trajectory(next(iter(named.values())), form, size, title=title), _caption(named)
    grid = Grid(tuple(named), 1, size, 2.0, "")

    def paint(canvas: Figure) -> None:
        for number, ((axes,), table) in enumerate(zip(grid.panels(canvas), named.values(), strict=True)):
            _paint(axes, table)
            axes.legend(frameon=False, fontsize=5, handlelength=1.6, labelspacing=0.2, borderaxespad=0.1)
            if not grid.is_left(number):
                axes.set_ylabel("")

    return drawn(paint, "sinkscope trajectory", form, grid.inches, title), _caption(named)


def _caption(named: dict[str, pd.DataFrame]) -> str:
    """What is drawn; where a training has several datasets or streams, also which of them."""
    firsts = {
        f"{printable(table['domain'].iloc[0])}, stream {table['stream'].iloc[0]}"
        for table in named.values() if len(table[["domain", "stream"]].drop_duplicates()) > 1
    }  # fmt: skip
    return f"{CAPTION} Drawn: {'; '.join(sorted(firsts))}." if firsts else CAPTION


def _paint(axes: Axes, trajectory: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    first = trajectory.iloc[0]
    selected = trajectory[(trajectory["domain"] == first["domain"]) & (trajectory["stream"] == first["stream"])]
    scores = selected[(selected["metric"] == "sink_score") & (selected["level"] == "head")]
    average = selected[(selected["metric"] == "sink_score") & (selected["level"] == "model")].sort_values("step")
    last = scores[scores["step"] == scores["step"].max()].sort_values("value", ascending=False, kind="stable")
    strongest = list(zip(last["layer"], last["head"], strict=True))[:NAMED]
    for place, rows in scores.sort_values("step").groupby(["layer", "head"], sort=False):
        if place not in strongest:
            axes.plot(rows["step"], rows["value"], color="0.8", linewidth=0.6, zorder=1)
    for (layer, head), color, dashes in zip(strongest, LINES, DASHES, strict=False):
        rows = scores[(scores["layer"] == layer) & (scores["head"] == head)].sort_values("step")
        axes.plot(rows["step"], rows["value"], color=color, linestyle=dashes, linewidth=1, label=f"head {layer}.{head}")
        low, high = rows["value"] - rows["sem"], rows["value"] + rows["sem"]
        axes.fill_between(rows["step"], low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(average["step"], average["value"], color="black", linewidth=1.2, label="mean of all heads")
    axes.set(xlabel="training step", ylabel=r"$\alpha_0$", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _below_the_loss(canvas: Figure, losses: pd.DataFrame) -> Axes:
    """Draws the loss in the upper third, and returns the axes below it."""
    above, below = canvas.subplots(2, sharex=True, height_ratios=(1, 2))
    above.plot(losses["step"], losses["loss"], color="black", linewidth=1)
    above.set(ylabel="loss (nats)")
    return below
