"""Tables at the terminal: one kind for rich's screens, one in plain text, and the map of all heads."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from sinkscope.present.colors import CIVIDIS, color_at, ink
from sinkscope.present.text import NO_BREAK, WIDTH, no_command, screen_width, terminal_width, wrapped

if TYPE_CHECKING:
    from sinkscope.runs.schema.stream import DormantHeads


NARROW, GAP = 12, 2
"""Columns that words may be folded into, and blanks between two columns."""


class Fitted(Table):
    """A table that cuts no number and no header. Where the terminal is too narrow it folds words; where that does not
    do, it leaves out its last columns and names them."""

    natural: tuple[int, ...] = ()
    """The width of each column: its longest cell."""
    needed: tuple[int, ...] = ()
    """The least width: the longest number, the longest word of the header, NARROW for other words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = fitting(self.natural, self.needed, options.max_width)
        if widths == self.natural:
            yield from super().__rich_console__(console, options)
            return
        narrow = copy.copy(self)
        narrow.columns = [
            replace(column, width=width, overflow="fold") for column, width in zip(self.columns, widths, strict=False)
        ]
        yield from Table.__rich_console__(narrow, console, options)
        absent = [str(column.header) for column in self.columns[len(widths) :]]
        if absent:
            yield f"(in a wider terminal also {'; '.join(absent)})"


def fitting(natural: tuple[int, ...], needed: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The widths of as many first columns as fit: the natural ones, of which the widest are narrowed to what they need.

    The first two columns always stand.
    """
    count = len(natural)
    while count > 2 and sum(needed[:count]) + GAP * (count - 1) > width:
        count -= 1
    widths, room = list(natural[:count]), width - GAP * (count - 1)
    while sum(widths) > room and (wider := [place for place in range(count) if widths[place] > needed[place]]):
        widest = max(wider, key=lambda place: widths[place])
        widths[widest] -= 1
    return tuple(widths)


def table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = (),
    bold: Collection[str] = (), title_style: str = "bold", fold: bool = False,
) -> Table:  # fmt: skip
    """A table without ruled lines, below its title.

    Columns named in `left` are left-aligned and may be folded, all others right-aligned. Columns named in `bold` are
    bold. `fold`: also a cell of the others continues on the next line where it is too long.
    """
    cells = list(rows)
    made = Fitted(box=None, pad_edge=False, title=title or None, title_justify="left", title_style=title_style)
    for header in headers:
        made.add_column(
            header, justify="left" if header in left else "right", style="bold" if header in bold else "",
            overflow="fold",
        )  # fmt: skip
    for row in cells:
        made.add_row(*row)
    longest = [max(map(cell_len, column), default=0) for column in zip(*cells, strict=True)] or [0] * len(headers)
    made.natural = tuple(max(cell_len(header), size) for header, size in zip(headers, longest, strict=True))
    words = [max(map(cell_len, header.split()), default=0) for header in headers]
    folds = [fold or header in left for header in headers]
    least = [min(size, NARROW) if folded else size for size, folded in zip(longest, folds, strict=True)]
    made.needed = tuple(map(max, words, least))
    return made


def aligned(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows as lines of text: the first `left` columns left-aligned, the others right-aligned, `gap` between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(_padded(row, widths, left)).rstrip() for row in rows]


def fitted(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ", keys: int = 1) -> list[str]:
    """As `aligned`. Where a terminal narrower than usual is too narrow for that, each row as sentences: its first
    `keys` cells, and below them the others, each behind its column's name in the first row."""
    lines, width = aligned(rows, left, gap), screen_width()
    if width >= WIDTH or max(map(len, lines)) <= width:
        return lines
    header, lines = rows[0], []
    for row in rows[1:]:
        told = [f"{name}: {cell}" if name else cell for name, cell in zip(header, row, strict=True) if cell]
        lines += wrapped(", ".join(told[:keys]), rest="    ")
        kept = [cell.replace(" ", NO_BREAK) if len(cell) + 3 <= width else cell for cell in told[keys:]]
        lines += wrapped("; ".join(kept), first="  ")
    return lines


def _padded(row: Sequence[str], widths: list[int], left: int) -> list[str]:
    cells = zip(row, widths, strict=True)
    return [cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(cells)]


WIDEST = 1000
"""Most columns that tables are laid out for, whatever COLUMNS says."""


def as_text(parts: Sequence[RenderableType], width: int, color: str | None) -> str:
    """The parts one below the other, with ANSI codes only if `color` names a colour system; no line ends in blanks."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, color_system=color, # type: ignore[arg-type]
        force_terminal=color is not None, no_color=color is None,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    console.print(Group(*parts))
    return "".join(no_command(line.rstrip()) + "\n" for line in buffer.getvalue().splitlines())


def terminal_style() -> dict[str, Any]:
    """Width and colour for the user's stdout: 80 columns when piped; NO_COLOR and FORCE_COLOR honoured."""
    console = Console()
    return {"width": min(terminal_width(), WIDEST), "color": console.color_system if not console.no_color else None}


ROWS, HEADS = 12, 12
"""Most domains, and most dormant heads of a domain, that are shown."""
FEW = 4
"""So many domains have sentences and maps of their own; they make 6 pairs. More would not fit on a screen."""


def dormant_heads(dormant: DormantHeads, heads: int) -> str:
    """The first dormant heads as layer.head, and how many more there are; `none` where there is none.

    `unknown` where the rule's column is missing in all of the stream's `heads`.
    """
    named = ", ".join(f"{layer}.{head}" for layer, head in dormant.heads[:HEADS])
    left_out = dormant.count - HEADS
    none = "unknown" if dormant.unknown == heads else "none"
    return (named or none) + (f" and {left_out} more (heads.csv)" if left_out > 0 else "")


def more(left_out: int, noun: str, file: str) -> list[RenderableType]:
    """A line that says how many more there are, and where; nothing where there are none."""
    return [Text(f"and {left_out} more {noun}{'s' if left_out > 1 else ''} ({file})")] if left_out > 0 else []


# A map of all heads at the terminal: layers down, heads across, a few characters per head.


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
