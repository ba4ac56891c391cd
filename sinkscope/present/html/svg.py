"""Small charts as SVG: lines, dots, a legend, heat maps of heads. Text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from sinkscope.present.colors import CIVIDIS, color_at, mixed
from sinkscope.present.numbers import significant
from sinkscope.present.text import printable

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 58, 34, 8
LETTER = 7
"""Pixels that a letter of a legend takes at most, on average."""

Point = tuple[float, float, str | int]
"""A place in a drawing, and what stands there: words, or the row of a head in the embedded data."""


def number(value: float | None) -> str:
    """A value as tooltips and tables on the page show it."""
    return significant(value, missing="missing")


def legend(bounds: tuple[float, float], label: str, scale: Sequence[str] = CIVIDIS) -> Markup:
    """The colours from lowest to highest."""
    steps = 24
    text = f"{significant(bounds[1], 3)} {printable(label)}"
    width = max(350, 68 + steps * 6 + LETTER * len(text))
    parts = [
        f'<svg class="legend" viewBox="0 0 {width} 24" width="{width}" height="24" role="img" '
        'aria-label="colour scale">'
    ]
    for step in range(steps):
        fill = mixed(scale, step / (steps - 1))
        parts.append(f'<rect x="{64 + step * 6}" y="4" width="6" height="12" fill="{fill}"/>')
    parts.append(f'<text x="60" y="14" class="tick end">{significant(bounds[0], 3)}</text>')
    parts.append(f'<text x="{68 + steps * 6}" y="14" class="tick">{escape(text)}</text>')
    return Markup("".join([*parts, "</svg>"]))


@dataclass(frozen=True)
class Line:
    """One line of a chart. The CSS class of its place in the chart (`c0`, `c1`, ...) gives its colour. `places`: what
    each dot says on hover of its place; the x axis and its value where there are none."""

    label: str
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)
    places: list[str] = field(default_factory=list)


def _range(values: list[float], log: bool) -> tuple[float, float]:
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not shown:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(shown), max(shown)
    if log:
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
    if low == high:  # one layer: from 0 on, so that the axis has no values that the unit does not have
        return min(0.0, 1.25 * low), max(0.0, 1.25 * high) or float(low == 0)
    pad = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.5 * high else low - pad), high + pad


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers between low and high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between low and high, at most about six."""
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]


class Plane:
    """Maps data to the chart's area and draws its axes."""

    def __init__(self, x: list[float], y: list[float], log: bool = False) -> None:
        finite = [value for value in x if math.isfinite(value)] or [0.0, 1.0]
        self.low_x, self.high_x = min(finite), max(finite)
        if self.low_x == self.high_x:
            self.low_x, self.high_x = self.low_x - 0.5, self.high_x + 0.5
        self.low, self.high = _range(y, log)
        self.log = log

    def x(self, value: float) -> float:
        """The place of a value on the horizontal axis, in units of the drawing."""
        return LEFT + (WIDTH - LEFT - 10) * (value - self.low_x) / (self.high_x - self.low_x)

    def y(self, value: float) -> float:
        """The place of a value on the vertical axis, in units of the drawing."""
        if self.log:
            share = math.log10(max(value, self.low) / self.low) / math.log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share

    def axes(self, x_label: str, y_label: str) -> str:
        """Both axes as SVG, with ticks and labels."""
        floor = HEIGHT - BOTTOM
        parts = [f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - 10}"/>']
        for value in decades(self.low, self.high) if self.log else ticks(self.low, self.high):
            parts.append(
                f'<text class="tick end" x="{LEFT - 5}" y="{self.y(value) + 4:.1f}">{significant(value)}</text>'
            )
        whole = x_label == "layer"  # there is none between two
        for value in (value for value in ticks(self.low_x, self.high_x) if not whole or value == round(value)):
            x = f"{self.x(value):.1f}"
            parts.append(f'<text class="tick mid" x="{x}" y="{floor + 14}">{significant(value)}</text>')
        middle = (TOP + floor) / 2
        parts.append(f'<text class="tick mid" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
        parts.append(
            f'<text class="tick mid" transform="translate(11 {middle}) rotate(-90)">{escape(printable(y_label))}</text>'
        )
        return "".join(parts)


def line_chart(
    lines: list[Line], x_label: str, y_label: str, log: bool = False, beside: Sequence[Line] = (),
    stretch: tuple[float, float] | None = None,
) -> Markup:  # fmt: skip
    """Lines with dots; a dot shows its value on hover. A missing value has no dot, and the line breaks there.

    `beside`: the lines of charts that this one is compared with; the axes span them too. `stretch`: the part of the x
    axis that is shaded.
    """
    spanned = [*lines, *beside]
    plane = Plane([x for line in spanned for x in line.x], [y for line in spanned for y in line.y], log)
    parts = [_open(y_label)]
    if stretch is not None:
        left, right = plane.x(stretch[0]) - 4, plane.x(stretch[1]) + 4
        parts.append(
            f'<rect class="stretch" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"/>'
        )
    parts.append(plane.axes(x_label, y_label))
    for order, line in enumerate(lines):
        drawable = [math.isfinite(y) and (y > 0 or not log) for y in line.y]
        joined = [False, *drawable[:-1]]
        places = line.places or [f"{x_label} {x:g}" for x in line.x]
        dots = zip(line.x, line.y, joined, places, strict=True)
        shown = [dot for dot, there in zip(dots, drawable, strict=True) if there]
        path = "".join(f"{'ML'[joins]}{plane.x(x):.1f} {plane.y(y):.1f}" for x, y, joins, _ in shown)
        parts.append(f'<path class="line c{order}" d="{path}"/>')
        for x, y, _, place in shown:
            title = f"{line.label}, {place}: {number(y)}"
            parts.append(
                f'<circle class="dot c{order}" cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="2.5">'
                f"<title>{escape(printable(title))}</title></circle>"
            )
    return Markup("".join([*parts, "</svg>"]))


@dataclass(frozen=True)
class Dot:
    """A dot of a scatter plot: its place in the data, its colour, what it says on hover. `marked`: it has a ring."""

    x: float
    y: float
    fill: str
    title: str
    marked: bool = False


def scatter(
    dots: list[Dot], x_label: str, y_label: str, dense: bool = False, reach: tuple[float, float] = (0.0, 0.0)
) -> tuple[Markup, list[Point]]:  # fmt: skip
    """One dot per head; a marked dot has a ring. With `dense` one path for each colour holds its dots, and the points
    say what a script shows on hover; without, each dot has its title and there are no points.
    `reach`: what both axes span at least, from 0."""
    dots = [dot for dot in dots if math.isfinite(dot.x) and math.isfinite(dot.y)]
    plane = Plane([0.0, reach[0], *(dot.x for dot in dots)], [0.0, reach[1], *(dot.y for dot in dots)])
    parts = [_open(y_label), plane.axes(x_label, y_label)]
    if dense:
        paths: dict[tuple[str, str], list[str]] = {}
        for dot in dots:
            left, middle = round(plane.x(dot.x) - 3.5, 1), round(plane.y(dot.y), 1)
            circle = f"M{left:g} {middle:g}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0"
            paths.setdefault((_kind(dot), dot.fill), []).append(circle)
        parts += [f'<path class="{kind}" fill="{fill}" d="{"".join(d)}"/>' for (kind, fill), d in paths.items()]
        return Markup("".join([*parts, "</svg>"])), [_point(dot, plane) for dot in dots]
    for dot in dots:
        parts.append(
            f'<circle class="{_kind(dot)}" cx="{plane.x(dot.x):.1f}" cy="{plane.y(dot.y):.1f}" r="3.5" '
            f'fill="{dot.fill}"><title>{escape(printable(dot.title))}</title></circle>'
        )
    return Markup("".join([*parts, "</svg>"])), []


def _point(dot: Dot, plane: Plane) -> Point:
    return round(plane.x(dot.x), 1), round(plane.y(dot.y), 1), printable(dot.title)


def _kind(dot: Dot) -> str:
    return "head marked" if dot.marked else "head"


def _open(label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(printable(label))}">'
    )


# Heat maps as SVG: layers down, heads across. A small map has a square for each head, a dense one a path a colour.


MAP_LEFT, MAP_TOP = 44, 16
"""Where the first square begins. templates/maps.js has the same numbers."""

MARKED = ' class="moved"'


@dataclass(frozen=True)
class Cell:
    """One square of a heat map.

    `index`: its row in the embedded data; None where a click shows nothing. `marked`: it has an outline.
    """

    row: int
    column: int
    value: float | None
    title: str
    index: int | None = None
    marked: bool = False


def heat_map(
    cells: list[Cell], rows: list[str], columns: int, bounds: tuple[float, float], label: str,
    scale: Sequence[str] = CIVIDIS, run: int = 0, dense: bool = False,
) -> Markup:  # fmt: skip
    """Layers down, heads across. Each square shows its title on hover; in a dense map a script does (see `points`)."""
    size = max(8, min(24, 760 // max(columns, 1)))
    width, height = MAP_LEFT + size * columns + 8, MAP_TOP + size * len(rows) + 6
    parts = [
        f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="{escape(printable(label))}" data-size="{size}">'
    ]
    step = max(1, math.ceil(24 / size))
    for column in range(0, columns, step):
        parts.append(f'<text x="{MAP_LEFT + size * (column + 0.5):g}" y="11" class="tick mid">{column}</text>')
    for row, name in enumerate(rows):
        if row % max(1, math.ceil(11 / size)) == 0:
            y = MAP_TOP + size * (row + 0.5) + 3.5
            parts.append(f'<text x="{MAP_LEFT - 5}" y="{y:g}" class="tick end">{escape(printable(name))}</text>')
    fills = [color_at(cell.value, *bounds, scale) or "none" for cell in cells]
    parts += _paths(cells, fills, size) if dense else _squares(cells, fills, size, run)
    return Markup("".join([*parts, "</svg>"]))


def points(cells: list[Cell]) -> list[Point]:
    """Column and row of every cell, with its row in the embedded data, or its title where it has none."""
    return [(cell.column, cell.row, printable(cell.title) if cell.index is None else cell.index) for cell in cells]


def _squares(cells: list[Cell], fills: list[str], size: int, run: int) -> list[str]:
    parts = []
    for cell, fill in zip(cells, fills, strict=True):
        focus = ""
        if cell.index is not None:
            tab = 0 if cell is cells[0] else -1
            focus = f' tabindex="{tab}" role="button" data-run="{run}" data-head="{cell.index}"'
        parts.append(
            f'<rect x="{MAP_LEFT + size * cell.column}" y="{MAP_TOP + size * cell.row}" width="{size - 1}" '
            f'height="{size - 1}" fill="{fill}"{focus}{MARKED if cell.marked else ""}>'
            f"<title>{escape(printable(cell.title))}</title></rect>"
        )
    return parts


def _paths(cells: list[Cell], fills: list[str], size: int) -> list[str]:
    """A scale has a few hundred colours, however many heads there are."""
    paths: dict[str, list[str]] = {}
    for cell, fill in zip(cells, fills, strict=True):
        square = f"M{MAP_LEFT + size * cell.column} {MAP_TOP + size * cell.row}h{size - 1}v{size - 1}h{1 - size}z"
        paths.setdefault(fill, []).append(square)
    outlines = "".join(
        f"M{MAP_LEFT + size * cell.column} {MAP_TOP + size * cell.row}h{size - 1}v{size - 1}h{1 - size}z"
        for cell in cells if cell.marked
    )  # fmt: skip
    drawn = [f'<path fill="{fill}" d="{"".join(squares)}"/>' for fill, squares in paths.items()]
    return [*drawn, f'<path fill="none"{MARKED} d="{outlines}"/>'] if outlines else drawn
