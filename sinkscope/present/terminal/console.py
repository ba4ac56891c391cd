"""Rich's renderables as a string: what every screen of the command line goes through."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType


def as_text(parts: Sequence[RenderableType], width: int, color: str | None) -> str:
    """The parts one below the other, with ANSI codes only if `color` names a colour system; no line ends in blanks."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, color_system=color, # type: ignore[arg-type]
        force_terminal=color is not None, no_color=color is None,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    console.print(Group(*parts))
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())
