"""What all figures share: formats, widths, one style, and the same bytes for the same figure."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.text import cut_in_the_middle, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
WIDTHS = {"column": 3.35, "page": 6.75}
"""Inches: a column, or the full page, of a two-column paper."""
STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42,
    "svg.hashsalt": "sinkscope", "svg.fonttype": "none", "savefig.dpi": 300,
}  # fmt: skip
"""PDF embeds whole TrueType fonts (type 42, which publishers ask for); SVG holds text as text, to search and edit."""
NO_TITLE = "none"
LETTER = 0.06
"""Inches that a letter of a title takes, on average."""


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def inches(size: str, ratio: float) -> tuple[float, float]:
    """Width and height of a figure whose height is `ratio` times its width.

    Raises SinkscopeError for a size that is not in WIDTHS.
    """
    if size not in WIDTHS:
        raise SinkscopeError(f"--size {size!r}: choose one of {', '.join(WIDTHS)}{did_you_mean(size, WIDTHS)}")
    return WIDTHS[size], WIDTHS[size] * ratio


def check_style(form: str, size: str) -> None:
    """Raises SinkscopeError, before what takes long, for a format or a size of no figure."""
    if form not in FORMATS:
        near = did_you_mean(form, FORMATS)
        raise SinkscopeError(f"a figure is written as .{', .'.join(FORMATS)}, not {form!r}{near}")
    inches(size, 1)


def need_finite(rows: pd.DataFrame, columns: Sequence[str], figure: str) -> None:
    """Raises SinkscopeError where one of the columns holds an infinite value, as a ratio with a denominator of 0 is: no
    axis shows it, and matplotlib fails in words of its own."""
    for name in (name for name in columns if name in rows):
        infinite = rows[np.isinf(rows[name].to_numpy(float))]
        if len(infinite):
            row = infinite.iloc[0]
            place = f"head {row['layer']}.{row['head']}" if "head" in rows else f"layer {row['layer']}"
            raise SinkscopeError(f"--figure {figure}: {name} of {place} is infinite, and no axis shows that")


def retitle(canvas: Figure, title: str | None) -> None:
    """Puts `title` in the place of the figure's own; `none` leaves it without one, None leaves it as it is.

    A figure's own title is its `suptitle`, or what stands above axes at the left. Names of panels, which stand above
    their middle, stay: without them nobody could tell the panels apart.
    """
    if title is None:
        return
    for axes in canvas.axes:
        axes.set_title("", loc="left")
    if title != NO_TITLE or canvas.get_suptitle():  # without need, an empty title would take a line
        headline(canvas, "" if title == NO_TITLE else title)


def fitting(text: str, width: float) -> str:
    """A name cut in the middle to `width` inches of title."""
    return cut_in_the_middle(text, max(6, int(width / LETTER)))


LEAST = 0.1
"""What an axis of values spans at least, as a share of them."""


def plain_axis(axes: Axes, log: bool = False) -> None:
    """Gives the vertical axis numbers that are written out: matplotlib adds an offset to each where the values are
    close together, and writes each as a power of ten where a logarithmic axis spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    if log:
        axes.set_yscale("log")
    low, high = axes.get_ylim()
    middle, least = (low + high) / 2, LEAST / 2 * max(abs(low), abs(high))
    if high - low < 2 * least:
        low, high = middle - least, middle + least
        axes.set_ylim(low, high)
    if not log:
        axes.ticklabel_format(axis="y", useOffset=False)
    elif high < 10 * low:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def headline(canvas: Figure, text: str) -> None:
    """Titles the whole figure, at the left as single axes are titled."""
    canvas.suptitle(printable(text), x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], parse_math=False)


def drawn(
    paint: Callable[[Figure], None], about: str, form: str, size: tuple[float, float], title: str | None = None,
    twice: bool = False,
) -> bytes:  # fmt: skip
    """The figure that `paint` draws, as PNG, SVG or PDF of `size` inches, with `about` in its metadata.

    `title`: as in `retitle`. `twice`: lay the figure out once more, for panels whose numbers the first layout changes,
    as it does where it makes room for a legend. Raises SinkscopeError for an unknown form, and where matplotlib is not
    installed.
    """
    check_style(form, "column")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SinkscopeError("figures need matplotlib: pip install 'sinkscope[figures]'") from None
    about = printable(about)
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": None, "Description": about},
        "svg": {"Date": None, "Creator": "sinkscope", "Description": about},
        "pdf": {"CreationDate": None, "Creator": "sinkscope", "Subject": about},
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas = Figure(figsize=size, layout="constrained")
        paint(canvas)
        retitle(canvas, title)
        if twice:
            canvas.draw_without_rendering()
        buffer = io.BytesIO()
        canvas.savefig(buffer, format=form, metadata=metadata[form])
    return buffer.getvalue()


ABREAST = {"column": 2, "page": 4}
"""Most panels beside each other."""
SCALE = 0.5
"""Inches at the left that the vertical axis' numbers and name take."""
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

    @property
    def panel(self) -> float:
        """Inches of a panel's name: the panel's width, with the gap to the next one."""
        return (self.inches[0] - SCALE) / self.shape[1]

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
                    axes.set_title(fitting(label, self.panel), parse_math=False)
                made[-1].append(axes)
        if self.title:
            headline(canvas, fitting(self.title, inches(self.size, 1)[0]))
        return made

    def share_layers(self, panels: list[list[Axes]]) -> None:
        """Leaves the numbers and the name of the horizontal axis to the lowest part of each series."""
        for stack in [] if self.beside else panels:
            for axes in stack[:-1]:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)

    def is_left(self, series: int) -> bool:
        """Whether a series stands at the left edge, where the axes are named."""
        return series % self.shape[1] == 0 or self.beside


def legend_below(canvas: Figure, axes: list[Axes], columns: int) -> None:
    """One legend for all panels, below them: each label once, in the order in which they come."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        canvas.legend(
            list(handles.values()), list(handles), frameon=False, ncols=min(columns, len(handles)), handlelength=1.8,
            columnspacing=1.2, loc="outside lower center",
        )  # fmt: skip
