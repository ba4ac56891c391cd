"""A page of one file that needs no network: its policy allows only its own style and script, by their hashes."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinkscope.errors import SinkscopeError, first_line
from sinkscope.present.html.svg import number
from sinkscope.present.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render_page(
    template: str, styles: tuple[str, ...], scripts: tuple[str, ...], images: bool = False, **shown: Any
) -> str:
    """Fills in a template. `styles`, `scripts`: files beside it. `images`: whether the page
    holds pictures within itself. Every value that is no Markup is escaped as text."""
    style = "".join((TEMPLATES / name).read_text("utf-8") for name in styles)
    code = "".join((TEMPLATES / name).read_text("utf-8") for name in scripts)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(code)}'; base-uri 'none'; "
        f"form-action 'none'{'; img-src data:' if images else ''}"
    )
    return _filled(template, style=trusted(style), script=trusted(code), policy=policy, **shown)


def render_fragment(template: str, **shown: Any) -> str:
    """Fills in a template that is a part of another page, such as a notebook: it has a style and no script."""
    return _filled(template, style=trusted((TEMPLATES / "cell.css").read_text("utf-8")), **shown)


def _filled(template: str, **shown: Any) -> str:
    """Raises SinkscopeError where jinja2 fails."""
    try:
        return _rendered(template, shown)
    except Exception as error:  # also where its version does not know what the template asks for
        raise SinkscopeError(f"jinja2 {version('jinja2')} cannot fill in {template}: {first_line(error)}") from error


def _rendered(template: str, shown: dict[str, Any]) -> str:
    return str(_environment().get_template(template).render(**shown))


@cache
def _environment() -> Environment:
    """Keeps the templates that it has compiled; each takes some 15 ms."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["printable"] = lambda value: printable(str(value))
    environment.filters["figure"] = number
    return environment


def trusted(text: str) -> Markup:
    """Text that stands in the page as it is: only what this package wrote or escaped."""
    from markupsafe import Markup

    return Markup(text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: `<`, `>`, `&` and line separators are escaped."""
    from sinkscope.runs.schema.base import plain

    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
