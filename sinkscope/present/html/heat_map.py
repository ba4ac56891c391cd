"""Heat maps as SVG: layers down, heads across. A small map has a square for each head, a dense one a path a colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from sinkscope.present.colors import CIVIDIS, color_at
from sinkscope.present.html.svg import Point
from sinkscope.present.text import printable

LEFT, TOP = 44, 16
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
    width, height = LEFT + size * columns + 8, TOP + size * len(rows) + 6
    parts = [
        f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="{escape(printable(label))}" data-size="{size}">'
    ]
    step = max(1, math.ceil(24 / size))
    for column in range(0, columns, step):
        parts.append(f'<text x="{LEFT + size * (column + 0.5):g}" y="11" class="tick mid">{column}</text>')
    for row, name in enumerate(rows):
        if row % max(1, math.ceil(11 / size)) == 0:
            y = TOP + size * (row + 0.5) + 3.5
            parts.append(f'<text x="{LEFT - 5}" y="{y:g}" class="tick end">{escape(printable(name))}</text>')
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
            f'<rect x="{LEFT + size * cell.column}" y="{TOP + size * cell.row}" width="{size - 1}" '
            f'height="{size - 1}" fill="{fill}"{focus}{MARKED if cell.marked else ""}>'
            f"<title>{escape(printable(cell.title))}</title></rect>"
        )
    return parts


def _paths(cells: list[Cell], fills: list[str], size: int) -> list[str]:
    """A scale has a few hundred colours, however many heads there are."""
    paths: dict[str, list[str]] = {}
    for cell, fill in zip(cells, fills, strict=True):
        square = f"M{LEFT + size * cell.column} {TOP + size * cell.row}h{size - 1}v{size - 1}h{1 - size}z"
        paths.setdefault(fill, []).append(square)
    outlines = "".join(
        f"M{LEFT + size * cell.column} {TOP + size * cell.row}h{size - 1}v{size - 1}h{1 - size}z"
        for cell in cells if cell.marked
    )  # fmt: skip
    drawn = [f'<path fill="{fill}" d="{"".join(squares)}"/>' for fill, squares in paths.items()]
    return [*drawn, f'<path fill="none"{MARKED} d="{outlines}"/>'] if outlines else drawn
