"""Width and colours of the terminal, and rich's renderables as a string."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType

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
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def terminal_style() -> dict[str, Any]:
    """Width and colour for the user's stdout: 80 columns when piped; NO_COLOR and FORCE_COLOR honoured."""
    console = Console()
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
    return {"width": min(max(40, width), WIDEST), "color": console.color_system if not console.no_color else None}
