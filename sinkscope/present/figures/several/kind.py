"""What a figure over several runs declares, and what their axes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from sinkscope.present.figures.series import Series

OFFSET = 0.35
"""Heads of a layer stand at most this far from the layer's place."""


@dataclass(frozen=True)
class Kind:
    """A figure over several runs.

    Attributes:
        tables: the tables of a run that it shows.
        parts: panels of each series.
        height: inches of a panel.
        paint: paints the panels of one series; told whether they stand at the left, where axes are named.
        caption: what it shows, and what its bands and bars are; plain text.
        legend_columns: entries of the legend beside each other, in a column.
        layers_below: whether layers are the horizontal axis of all parts.
    """

    name: str
    tables: tuple[str, ...]
    parts: int
    height: float
    paint: Callable[[Series, list[Axes], bool], None]
    caption: str
    legend_columns: int = 3
    layers_below: bool = True


def by_layer(axes: Axes) -> None:
    """Names the horizontal axis: layers, at whole numbers. A single layer gets room of its own."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim((low + high - 1) / 2, (low + high + 1) / 2)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def beside_layers(rows: pd.DataFrame) -> pd.Series:
    """The horizontal place of each head: its layer's, with the heads of a layer beside each other."""
    last = int(rows["head"].max())
    return rows["layer"] + (OFFSET * (2 * rows["head"] / last - 1) if last else 0.0)
