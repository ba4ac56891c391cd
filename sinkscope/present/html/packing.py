"""Charts and data of a large report: compressed in the page, and unpacked by its script."""

from __future__ import annotations

import base64
import zlib
from typing import Any

from markupsafe import Markup


def packed(text: str) -> str:
    """The text as UTF-8 in zlib's format, in base64: nothing in it can end the script element it stands in."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> str:
    """The text that `packed` was given."""
    return zlib.decompress(base64.b64decode(text)).decode()


def parked(charts: list[dict[str, Any]]) -> list[str]:
    """Takes the SVG out of charts and returns it, in their order; each chart keeps a place that the script fills."""
    drawings: list[str] = []
    for chart in charts:
        if chart["svg"]:
            chart["svg"], drawing = Markup('<div data-drawing="{}"></div>').format(len(drawings)), chart["svg"]
            drawings.append(str(drawing))
    return drawings
