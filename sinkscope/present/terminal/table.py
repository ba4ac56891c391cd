"""Tables at the terminal: one kind for rich's screens, one in plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table


def table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = (),
    bold: Collection[str] = (), title_style: str = "bold", fold: bool = False,
) -> Table:  # fmt: skip
    """A table without ruled lines, below its title.

    Columns named in `left` are left-aligned, all others right-aligned. Columns named in `bold` are bold. `fold`: a cell
    that is too long continues on the next line instead of being cut.
    """
    made = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style=title_style)
    for header in headers:
        made.add_column(
            header, justify="left" if header in left else "right", style="bold" if header in bold else "",
            overflow="fold" if fold else "ellipsis",
        )  # fmt: skip
    for row in rows:
        made.add_row(*row)
    return made


def aligned(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows as lines of text: the first `left` columns left-aligned, the others right-aligned, `gap` between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(_padded(row, widths, left)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: list[int], left: int) -> list[str]:
    cells = zip(row, widths, strict=True)
    return [cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(cells)]
