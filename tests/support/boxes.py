"""Where the words of a figure stand: their boxes, measured after the figure was saved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

DPI = 300
"""Figures are saved at this resolution; hinting moves letters at lower ones."""
SLACK = 3.0
"""Pixels by which boxes may pass each other: a box holds room around its letters."""


def faults(canvas: Figure) -> list[str]:
    """Words that a saved figure cuts off at its edge, and pairs of words that run into each other."""
    canvas.set_dpi(DPI)
    canvas.draw_without_rendering()
    boxes = list(_boxes(canvas))
    width, height = canvas.bbox.width, canvas.bbox.height
    cut = [
        f"{text!r} is cut off: {box.extents.round(1)} of {width:.0f} x {height:.0f}"
        for text, box in boxes
        if min(box.x0, box.y0) < -SLACK or box.x1 > width + SLACK or box.y1 > height + SLACK
    ]
    met = [
        f"{one!r} runs into {other!r}"
        for (one, first), (other, second) in combinations(boxes, 2)
        if (shared := Bbox.intersection(first, second)) is not None and min(shared.width, shared.height) > SLACK
    ]
    return cut + met


def faults_when_saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that every figure saved from now on adds its `faults` to."""
    found: list[str] = []
    save = Figure.savefig

    def seen(canvas: Figure, *args: Any, **options: Any) -> None:
        save(canvas, *args, **options)
        found.extend(faults(canvas))

    monkeypatch.setattr(Figure, "savefig", seen)
    return found


def _boxes(canvas: Figure) -> Iterator[tuple[str, Bbox]]:
    axes = [axis for each in canvas.axes for axis in (each.xaxis, each.yaxis)]
    ticks = {id(text) for axis in axes for text in _labels(axis)}
    seen = {id(text) for axis in axes for text in _in_view(axis)}
    for text in canvas.findobj(Text):
        hidden = id(text) in ticks and id(text) not in seen
        if text.get_visible() and text.get_text().strip() and not hidden:
            yield text.get_text(), text.get_window_extent()


def _labels(axis: Axis) -> list[Text]:
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [label for tick in ticks for label in (tick.label1, tick.label2)]


def _in_view(axis: Axis) -> list[Text]:
    """The labels of ticks that are drawn: an axis keeps others, which lie outside its limits."""
    low, high = sorted(axis.get_view_interval())
    pairs = [*zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=False)]
    pairs += zip(axis.get_minor_ticks(), axis.get_minorticklocs(), strict=False)
    shown = axis.axes.get_visible() and axis.get_visible() and axis.axes.axison
    return [tick.label1 for tick, at in pairs if shown and low <= at <= high and tick.label1.get_visible()]
