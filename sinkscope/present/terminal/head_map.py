"""A map of all heads at the terminal: layers down, heads across, a few characters per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from sinkscope.present.colors import CIVIDIS, color_at, ink

MARGIN = 6
"""Columns that a layer's number takes."""


@dataclass(frozen=True)
class MapRow:
    """One layer: the values of its heads, and a note to its right."""

    layer: int
    values: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Cells:
    """How a map writes a head: `text` of `size` characters, in rich's `style`; at most `per_line` heads on a line."""

    size: int
    per_line: int
    text: Callable[[float], str]
    style: Callable[[float], str]


def head_map(title: str, rows: Sequence[MapRow], cells: Cells, width: int) -> Text:
    """The map below its title, with a line of head numbers where cells are wide enough for them."""
    text = Text(f"\n{title}: layers down, heads across\n", style="bold")
    if cells.size > 1:
        numbers = "".join(f"{head:>{cells.size}}" for head in range(max(len(row.values) for row in rows)))
        text.append(" " * MARGIN + numbers + "\n", style="not bold dim")
    for row in rows:
        _append_layer(text, row, cells, width)
    return text


def _append_layer(text: Text, row: MapRow, cells: Cells, width: int) -> None:
    """Appends a layer on as many lines as it needs. Its note goes on the first line, where there is room."""
    for start in range(0, len(row.values), cells.per_line):
        line = row.values[start : start + cells.per_line]
        text.append(f"{row.layer:>{MARGIN - 1}} " if start == 0 else " " * MARGIN, style="not bold dim")
        for value in line:
            text.append(cells.text(value), style=cells.style(value))
        if start == 0 and row.note and MARGIN + cells.size * len(line) + 2 + len(row.note) <= width:
            text.append(f"  {row.note}", style="not bold dim")
        text.append("\n")


def shades(low: float, high: float, scale: Sequence[str] = CIVIDIS) -> Callable[[float], str]:
    """Styles for a map in colour: the scale's colour behind each value, with ink that is legible on it."""

    def style(value: float) -> str:
        background = color_at(value, low, high, scale)
        return "not bold dim" if background is None else f"not bold {ink(background)} on {background}"

    return style


def plain(value: float) -> str:
    """The style of every cell in a map without colour."""
    return "not bold"
