"""Palettes with the reasons for them, colours mixed between their anchors, and ink that is legible on a colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAP = "cividis"
"""matplotlib's name of the map for values from low to high. Colour-blind readers see the same order, and it prints in
grey: its lightness rises evenly."""

CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
"""Anchors of the same map for the HTML report and the terminal."""

DIVERGING = ("#2166ac", "#92c5de", "#d9d9d9", "#f4a582", "#b2182b")
"""Blue below zero, red above: ColorBrewer's RdBu, safe for colour-blind readers. Its middle is grey instead of white,
because a cell without a value stays blank."""

LINES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's colours for lines in figures, safe for colour-blind readers. The report's lines have their own, in
page.css: darker on white paper and lighter on dark, so that thin lines keep their contrast."""

CONTROL = "#595959"
"""The colour of a control's line, whatever the other lines' colours."""


def mixed(scale: Sequence[str], share: float) -> str:
    """The colour at `share` of the way along the scale, 0 to 1, mixed between the two nearest anchors."""
    place = min(1.0, max(0.0, share)) * (len(scale) - 1)
    index = min(int(place), len(scale) - 2)
    pairs = zip(_channels(scale[index]), _channels(scale[index + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - index)):02x}" for a, b in pairs)


def color_at(value: float | None, low: float, high: float, scale: Sequence[str] = CIVIDIS) -> str | None:
    """The scale's colour for a value between `low` and `high`; None for a missing value."""
    if value is None or math.isnan(value):
        return None
    return mixed(scale, 0.5 if high <= low else (value - low) / (high - low))


def ink(background: str) -> str:
    """`black` or `white`: the one with the larger contrast to the background, by WCAG 2's relative luminance."""
    light = _luminance(background)
    return "black" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "white"


def _channels(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(color: str) -> float:
    linear = [
        channel / 255 / 12.92 if channel <= 10 else ((channel / 255 + 0.055) / 1.055) ** 2.4
        for channel in _channels(color)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
