"""Charts and data of a large report: compressed in the page, and unpacked by its script."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

BLOCK = 64
"""Heads whose curves stand together; templates/report.js has the same number. In a large report the script unpacks one
block when a head of it is chosen, so that opening the page costs the same for any number of heads."""


def packed(text: str) -> str:
    """The text as UTF-8 in zlib's format, in base64: nothing in it can end the script element it stands in."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> str:
    """The text that `packed` was given."""
    return zlib.decompress(base64.b64decode(text)).decode()


def blocks(heads: list[Any]) -> list[list[Any]]:
    """The heads in groups of BLOCK; the last is shorter."""
    return [heads[start : start + BLOCK] for start in range(0, len(heads), BLOCK)]


def listed(values: Iterable[str]) -> str:
    """A list in JSON of values that are JSON already."""
    return f"[{','.join(values)}]"


def parked(charts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Takes the SVG out of charts and returns it with its points, in their order; each chart keeps a place that the
    script fills."""
    drawings: list[dict[str, Any]] = []
    for chart in charts:
        if chart["svg"]:
            chart["svg"], drawing = Markup('<div data-drawing="{}"></div>').format(len(drawings)), chart["svg"]
            drawings.append({"svg": str(drawing), "points": chart.get("points", [])})
    return drawings
