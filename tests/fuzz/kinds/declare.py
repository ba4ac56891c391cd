"""How a kind of case is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from contract import Case

Draw = Callable[[Path, Path, Random], Case]
KINDS: dict[str, tuple[int, Draw]] = {}
"""Number of cases of each kind, and what draws one from the world's folder, the case's folder and a generator."""


def kind(count: int) -> Callable[[Draw], Draw]:
    """Declares a kind of case by the name of its function."""

    def declare(draw: Draw) -> Draw:
        KINDS[draw.__name__] = count, draw
        return draw

    return declare
