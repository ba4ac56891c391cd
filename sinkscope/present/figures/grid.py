"""Panels of a figure over several runs: a column for each series and a row for each part, as wide as a paper's page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinkscope.present.figures.canvas import headline, inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABREAST = {"column": 2, "page": 4}
"""Most panels beside each other."""
LEGEND = 0.35
"""Inches that the legend below the panels takes."""


@dataclass(frozen=True)
class Grid:
    """The places of `series` x `parts` panels.

    The parts of one series stand below each other, or beside each other where there is one series and room. `height`:
    inches of a panel. `title`: what all series have in common.
    """

    labels: tuple[str, ...]
    parts: int
    size: str
    height: float
    title: str

    @property
    def beside(self) -> bool:
        """Whether the parts of the only series stand beside each other."""
        return len(self.labels) == 1 and 1 < self.parts <= ABREAST[self.size] and self.size == "page"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of panels."""
        if self.beside:
            return 1, self.parts
        columns = min(len(self.labels), ABREAST[self.size])
        return self.parts * -(-len(self.labels) // columns), columns

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the figure. Raises SinkscopeError for an unknown size."""
        width = inches(self.size, 1)[0]
        return width, self.shape[0] * self.height + LEGEND

    def place(self, series: int, part: int) -> tuple[int, int]:
        """Row and column of a panel."""
        if self.beside:
            return 0, part
        block, column = divmod(series, self.shape[1])
        return block * self.parts + part, column

    def panels(self, canvas: Figure) -> list[list[Axes]]:
        """Makes the panels, by series and part, and names them. Panels of a part share their scales."""
        grid = canvas.add_gridspec(*self.shape)
        first: dict[int, Axes] = {}
        made: list[list[Axes]] = []
        for number, label in enumerate(self.labels):
            made.append([])
            for part in range(self.parts):
                row, column = self.place(number, part)
                axes = canvas.add_subplot(grid[row, column], sharey=first.get(part))
                first.setdefault(part, axes)
                if column and not self.beside:
                    axes.tick_params(labelleft=False)
                if part == 0 and len(self.labels) > 1:
                    axes.set_title(label, parse_math=False)
                made[-1].append(axes)
        if self.title:
            headline(canvas, self.title)
        return made

    def share_layers(self, panels: list[list[Axes]]) -> None:
        """Leaves the numbers and the name of the horizontal axis to the lowest part of each series."""
        for own in [] if self.beside else panels:
            for axes in own[:-1]:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)

    def is_left(self, series: int) -> bool:
        """Whether a series stands at the left edge, where the axes are named."""
        return series % self.shape[1] == 0 or self.beside


def legend_below(canvas: Figure, axes: list[Axes], columns: int) -> None:
    """One legend for all panels, below them: each label once, in the order in which they come."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        canvas.legend(
            list(found.values()), list(found), frameon=False, ncols=min(columns, len(found)), handlelength=1.8,
            columnspacing=1.2, loc="outside lower center",
        )  # fmt: skip
