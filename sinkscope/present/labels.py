"""Names that people read, for keys and columns that code uses."""

from __future__ import annotations

CHANGED = {
    "gained_sink": "gained a sink",
    "lost_sink": "lost its sink",
    "woke": "woke (dormant no more)",
    "fell_dormant": "fell dormant",
}
"""The changes of state that a comparison lists."""
