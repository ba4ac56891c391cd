"""How a result shows itself in a notebook. Drawing stands above the data, so it is told from above who draws."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

_painters: list[str] = []


class Picture(Protocol):
    """A figure that a notebook shows. `caption` says what it shows and what its bands are."""

    caption: str

    def save(self, path: str | Path) -> Path:
        """Writes the figure as PNG, SVG or PDF, by the path's ending."""
        ...


def drawn_by(module: str) -> None:
    """Names the module that draws results. It is imported when a result is first shown."""
    _painters[:] = [module]


def _painter(name: str) -> Any:
    """The drawing module's function of that name."""
    return getattr(import_module(_painters[-1]), name)


class ShownRun:
    """What a run shows of itself in a notebook."""

    def _repr_html_(self) -> str:
        """The answer and a map of the heads."""
        return str(_painter("run_html")(self))

    def plot(
        self, figure: str = "heatmap", *, metric: str | None = None, domain: str | None = None, size: str = "page",
        title: str | None = None, ax: Any = None,
    ) -> Any:  # fmt: skip
        """A figure of the run's tables: a notebook shows it, `.save(path)` writes it, `.caption` says what it shows.

        Args:
            figure: heatmap, profile, length or scatter; or a figure of a question that the run was asked, such as
                switch (`sinkscope plot --help` lists them).
            metric: the column of heads.csv that a heat map shows; bos_mass by default.
            domain: the text to draw where the run has several; the first by default.
            ax: axes of matplotlib to draw on, for heatmap, length and scatter; they are returned in place of a figure.
            size: column or page, the width of a paper's column or of its page.
            title: replaces the figure's own; `none` leaves it out.

        Raises SinkscopeError for an unknown name, where the run lacks the figure's table, and without matplotlib.
        """
        if ax is not None:
            return _painter("run_axes")(self, figure, metric, domain, title, ax)
        drawn: Picture = _painter("run_figure")(self, figure, metric, domain, size, title)
        return drawn


class ShownComparison:
    """What a comparison shows of itself in a notebook."""

    def _repr_html_(self) -> str:
        """The differences of the summary, the heads that changed, and maps."""
        return str(_painter("comparison_html")(self))
