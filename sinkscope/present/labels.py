"""Names that people read, for keys and columns that code uses."""

from __future__ import annotations

CHANGED = {
    "gained_sink": "gained a sink",
    "lost_sink": "lost its sink",
    "woke": "became active (no longer dormant)",
    "fell_dormant": "became dormant",
}
"""The changes of state that a comparison lists."""


def within_noise(count: int, beside_others: bool) -> str:
    """What follows a list of changes: how many heads crossed the threshold without a difference that holds."""
    if not count:
        return ""
    heads = "more" if beside_others else "head" if count == 1 else "heads"
    return f"; {count} {heads} crossed the threshold without a difference that holds"
