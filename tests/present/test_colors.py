"""Colours: the anchors, the mixing between them, and legible ink."""

from __future__ import annotations

import re

import pytest

from sinkscope.present.colors import CIVIDIS, DIVERGING, color_at, ink, mixed
from sinkscope.present.html.svg import legend


@pytest.mark.parametrize("scale", [CIVIDIS, DIVERGING])
def test_a_scale_goes_through_its_anchors(scale: tuple[str, ...]) -> None:
    assert [mixed(scale, place / (len(scale) - 1)) for place in range(len(scale))] == list(scale)
    assert mixed(scale, -1) == scale[0]
    assert mixed(scale, 2) == scale[-1]


def test_between_two_anchors_colours_are_mixed() -> None:
    assert mixed(("#000000", "#ff8040"), 0.5) == "#804020"


def test_zero_is_the_middle_of_a_signed_scale() -> None:
    assert color_at(0.0, -2.0, 2.0, DIVERGING) == DIVERGING[2]
    assert color_at(float("nan"), 0, 1) is None
    assert color_at(None, 0, 1) is None
    assert color_at(3.0, 3.0, 3.0) == mixed(CIVIDIS, 0.5)


def contrast(background: str, text: str) -> float:
    """WCAG 2's contrast ratio, by its definition."""

    def luminance(color: str) -> float:
        channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    a, b = sorted((luminance(background), luminance({"black": "#000000", "white": "#ffffff"}[text])))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.parametrize("scale", [CIVIDIS, DIVERGING])
def test_ink_is_legible_on_every_shade(scale: tuple[str, ...]) -> None:
    """4.5 is WCAG's bound for text; black or white reaches it on any background."""
    for step in range(101):
        background = mixed(scale, step / 100)
        assert contrast(background, ink(background)) >= 4.5, background


def schemes() -> dict[str, dict[str, str]]:
    """The colours of the pages by name, for light and dark windows and for print."""
    from sinkscope.present.html.page import TEMPLATES

    css = (TEMPLATES / "page.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    light, dark, printed = (dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks)
    return {"light": light, "dark": light | dark, "print": light | printed}


def luminance(color: str) -> float:
    """WCAG 2's relative luminance."""
    shares = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_words_of_pages_have_the_contrast_that_wcag_asks_for(scheme: str) -> None:
    """4.5 to 1 for text, 3 to 1 for lines of charts."""
    colors = {name: color if len(color) == 7 else "#" + "".join(2 * digit for digit in color[1:])
              for name, color in schemes()[scheme].items()}  # fmt: skip
    paper = luminance(colors["paper"])
    for name, least in {"ink": 4.5, "soft": 4.5, "warn": 4.5, "c0": 4.5, "c1": 3, "c2": 3, "c3": 3}.items():
        pair = sorted((paper, luminance(colors[name])))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, name


def test_a_legend_has_room_for_its_words() -> None:
    """`first-token attention (probability)` was cut at 350 pixels."""
    for label in ("layer", "first-token attention of a layer", "first-token attention (probability)"):
        drawn = legend((0, 1), label)
        found = re.search(r'viewBox="0 0 (\d+) .*<text x="(\d+)" y="14" class="tick">1 ', drawn)
        assert found
        width, start = map(int, found.groups())
        assert width - start >= 6.5 * len(f"1 {label}")
