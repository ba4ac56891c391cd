"""How much of a long list a screen shows, and the line that says what is left out and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from sinkscope.runs.schema.stream import DormantHeads

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
