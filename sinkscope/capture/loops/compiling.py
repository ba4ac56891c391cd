"""How a loop is compiled: when its module is imported, for one list of types, into machine code that is kept.

Numba keeps the code beside the module's bytecode, or in the user's cache folder, so that only the first import on a
machine takes the seconds of a compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, no_type_check

from numba import njit
from numba.core import event

from sinkscope.capture.loops.compilation import COMPILATION

ROWS = "Tuple((float32[::1], int64, int64, int64))"
"""Rows of numbers where they lie in memory, as `loops.rows` describes them: the memory, how far apart the items of the
first axis and the rows are in it, and the width of a row."""

ANY_ORDER = {"reassoc", "nsz", "contract"}
"""Sums may be added in any order, which lets the processor add many numbers at once."""


class _Heard(event.Listener):  # type: ignore[misc]
    """Hears when numba compiles, which it does not where it loads what an earlier process compiled."""

    def on_start(self, event: Any) -> None:
        COMPILATION.began()

    def on_end(self, event: Any) -> None:
        COMPILATION.ended()


event.register("numba:compile", _Heard())


def compiled(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function for arguments of these types, or loads what an earlier process compiled.

    `nogil` lets threads share the work. A loop's body is not Python: mark it with typing.no_type_check.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": ANY_ORDER}

    def compile_one(function: Callable[..., None]) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no folder can be written in which the machine code would be kept
            return njit(signature, **options)(function)

    return compile_one


def helper(function: Callable[..., Any]) -> Any:
    """Compiles a function for loops to call; it becomes a part of each."""
    return njit(fastmath=ANY_ORDER)(function)


@helper
@no_type_check
def row(rows, item, place):
    """One of the rows that ROWS describes."""
    memory, by_item, by_row, width = rows
    first = item * by_item + place * by_row
    return memory[first : first + width]
