"""How Sphinx builds the site: `sphinx-build -c docs -W . build/site` reads the Markdown files as they lie on a forge.

The source folder is the repository, so that links to examples/ and to CHANGELOG.md lead to pages of the site too.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "sinkscope"
author = "The sinkscope authors"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
myst_heading_anchors = 4
"""The anchors of headings are those that a forge gives them."""
suppress_warnings = ["myst.header"]  # a transcript or a list of columns may start below the second level

highlight_language = "text"  # commands and their answers
smartquotes = False
html_theme = "furo"
html_title = "sinkscope"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["site"]
"""index.html, which leads to the first page, since that lies in a folder."""

SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.M)
LINK = re.compile(r"\]\(([^)#:]+\.md)\)")


def with_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Gives the list of all pages, docs/index.md, to the navigation: a group a heading, in the order of its links."""
    if name == root_doc:
        source[0] += "".join(_group(title, LINK.findall(text)) for title, text in SECTION.findall(source[0]))


def _group(title: str, links: list[str]) -> str:
    pages = [f"/{(ROOT / 'docs' / link).resolve().relative_to(ROOT).with_suffix('')}" for link in links]
    return "\n".join(["\n```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def without_the_way_back(app: Sphinx, name: str, source: list[str]) -> None:
    """Leaves out the line that leads back to the list of pages: the site has its navigation."""
    source[0] = re.sub(r"^\[All pages\]\([^)]*\)\n", "", source[0], count=1, flags=re.M)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", with_navigation)
    app.connect("source-read", without_the_way_back)
    return {"parallel_read_safe": True}
