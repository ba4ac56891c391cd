"""Names that people read, for keys and columns that code uses."""

from __future__ import annotations

CHANGED = {
    "gained_sink": "gained a sink",
    "lost_sink": "lost its sink",
    "woke": "became active (no longer dormant)",
    "fell_dormant": "became dormant",
}
"""The changes of state that a comparison lists."""
