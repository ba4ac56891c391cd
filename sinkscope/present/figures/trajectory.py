"""The figure of a training: the sink score of every head, and the mean of all, at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import drawn, inches

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 5
"""Heads that the legend names: those with the largest sink score at the last step."""


def draw_trajectory(
    trajectory: pd.DataFrame, form: str, size: str = "column", losses: pd.DataFrame | None = None
) -> bytes:
    """alpha_0 of each head of the first domain and stream against training steps, with bands of its standard error.

    The strongest heads at the last step have colours and names, all others are grey. The black line is the mean.
    `losses`, columns step and loss, are drawn above it over the same steps.
    """
    first = trajectory.iloc[0]
    own = trajectory[(trajectory["domain"] == first["domain"]) & (trajectory["stream"] == first["stream"])]
    scores = own[(own["metric"] == "sink_score") & (own["level"] == "head")]
    average = own[(own["metric"] == "sink_score") & (own["level"] == "model")].sort_values("step")

    def paint(canvas: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = canvas.subplots() if losses is None else _below_the_loss(canvas, losses)
        last = scores[scores["step"] == scores["step"].max()].sort_values("value", ascending=False, kind="stable")
        named = list(zip(last["layer"], last["head"], strict=True))[:NAMED]
        for place, rows in scores.sort_values("step").groupby(["layer", "head"], sort=False):
            if place not in named:
                axes.plot(rows["step"], rows["value"], color="0.8", linewidth=0.6, zorder=1)
        for (layer, head), color in zip(named, LINES, strict=False):
            rows = scores[(scores["layer"] == layer) & (scores["head"] == head)].sort_values("step")
            axes.plot(rows["step"], rows["value"], color=color, linewidth=1, label=f"head {layer}.{head}")
            low, high = rows["value"] - rows["sem"], rows["value"] + rows["sem"]
            axes.fill_between(rows["step"], low, high, color=color, alpha=0.25, linewidth=0)
        axes.plot(average["step"], average["value"], color="black", linewidth=1.2, label="mean of all heads")
        axes.set(xlabel="training step", ylabel=r"$\alpha_0$", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    return drawn(paint, "sinkscope trajectory", form, inches(size, 0.95 if losses is None else 1.25))


def _below_the_loss(canvas: Figure, losses: pd.DataFrame) -> Axes:
    """Draws the loss in the upper third, and returns the axes below it."""
    above, below = canvas.subplots(2, sharex=True, height_ratios=(1, 2))
    above.plot(losses["step"], losses["loss"], color="black", linewidth=1)
    above.set(ylabel="loss (nats)")
    return below
