"""Verdicts as a page, in Markdown and in HTML, made of the same parts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from sinkscope.claims.claim import NOT_TESTED, Claim
from sinkscope.claims.findings import CONTRAST, DECIDING, FIGURE, VERDICT, number_of
from sinkscope.claims.screen import paper_name
from sinkscope.present.text import markdown_cell, printable

WIDTH = 120
TITLE = "What papers claim, put to the test"


@dataclass(frozen=True)
class Section:
    """What a page says of one claim. `words`: label and text of each paragraph. `table`: rows of cells, the first one
    the header. `figure`: file and caption."""

    title: str
    words: list[tuple[str, str]]
    table: list[list[str]]
    figure: tuple[str, str] | None = None


@dataclass(frozen=True)
class Page:
    """An overview, and the sections of each paper by its name."""

    overview: list[list[str]]
    papers: dict[str, list[Section]] = field(default_factory=dict)


def make_page(
    table: pd.DataFrame, claims: Sequence[Claim], figures: Mapping[str, tuple[str, str]] | None = None
) -> Page:
    """The page of a table of findings. `figures`: file and caption of each figure, by its name."""
    subjects = list(dict.fromkeys(table["subject"]))
    overview = [["claim", "by", *subjects]]
    overview += [[claim.title, claim.by, *(_verdict(table, claim, each) for each in subjects)] for claim in claims]
    papers: dict[str, list[Section]] = {}
    drawn: set[str] = set()
    for claim in claims:
        own = [each for each in claims if each.paper == claim.paper]
        figure = None if claim.figure in drawn else (figures or {}).get(claim.figure)
        drawn |= {claim.figure} if figure else set()
        papers.setdefault(paper_name(claim.paper, own), []).append(
            Section(
                claim.title[:1].upper() + claim.title[1:],
                _words(table, claim, subjects),
                _numbers(table, claim, subjects),
                figure,
            )
        )
    return Page(overview, papers)


def _words(table: pd.DataFrame, claim: Claim, subjects: list[str]) -> list[tuple[str, str]]:
    words = [("", claim.says), ("Source", claim.source), ("Assumed", claim.assumes), ("Rule", claim.rule.words)]
    measured = claim.needs.words
    measured = f"`{measured}`" if measured.startswith("sinkscope ") else measured
    words += [("Measured", f"{measured}."), ("Not tested", _untested(table, claim, subjects))]
    return [(label, _capital(text)) for label, text in [*words, ("Not shown", claim.not_shown)] if text]


def _untested(table: pd.DataFrame, claim: Claim, subjects: list[str]) -> str:
    """Why, with the subjects that share a reason together; empty where the claim was put to all."""
    reasons: dict[str, list[str]] = {}
    for subject in subjects:
        row = _rows(table, claim, subject, VERDICT).iloc[0]
        if row["shown"] == NOT_TESTED:
            reasons.setdefault(str(row["quantity"]), []).append(subject)
    told = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
    return f"{told}." if told else ""


def _capital(text: str) -> str:
    """The text as a sentence begins; a symbol such as z stays small."""
    first = text.split()[0]
    return text if not first.isalpha() or len(first) == 1 else text[:1].upper() + text[1:]


def _numbers(table: pd.DataFrame, claim: Claim, subjects: list[str]) -> list[list[str]]:
    """Verdict, deciding number, contrast and further numbers down, subjects across."""
    rows = [["", *subjects], ["verdict", *(_verdict(table, claim, each) for each in subjects)]]
    for kind, label in ((DECIDING, ""), (CONTRAST, "contrast: "), (FIGURE, "")):
        found = table[(table["claim"] == claim.name) & (table["row"] == kind)]
        for quantity in dict.fromkeys(found["quantity"]):
            own = found[found["quantity"] == quantity].set_index("subject")
            cells = [number_of(own.loc[each]).told if each in own.index else "-" for each in subjects]
            rows.append([f"{label}{quantity}", *cells])
    return rows


def _verdict(table: pd.DataFrame, claim: Claim, subject: str) -> str:
    return str(_rows(table, claim, subject, VERDICT)["shown"].iloc[0])


def _rows(table: pd.DataFrame, claim: Claim, subject: str, row: str) -> pd.DataFrame:
    return table[(table["claim"] == claim.name) & (table["subject"] == subject) & (table["row"] == row)]


def in_markdown(page: Page, title: str = TITLE) -> str:
    """The page in Markdown. Names and texts are escaped; what stands between grave accents is code."""
    lines = [f"# {title}", ""] if title else []
    lines += [*_markdown_table(page.overview), ""]
    for paper, sections in page.papers.items():
        lines += [f"## {_markdown(paper)}", ""]
        for section in sections:
            lines += [f"### {_markdown(section.title)}", ""]
            for label, text in section.words:
                start = f"**{_markdown(label)}.** " if label else ""
                lines += [*_wrapped(f"{start}{_markdown(text)}"), ""]
            lines += [*_markdown_table(section.table), ""]
            if section.figure:
                file, caption = section.figure
                lines += [f"![{_markdown(caption)}]({file})", ""]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _markdown_table(rows: list[list[str]]) -> list[str]:
    lines = [[_markdown(cell) for cell in row] for row in rows]
    lines.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return [("| " + " | ".join(line) + " |").replace("|  |", "| |") for line in lines]


def _markdown(text: str) -> str:
    return "".join(
        f"`{printable(part).replace('|', chr(92) + '|')}`" if code else markdown_cell(part)
        for part, code in parts(text)
    )


def parts(text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it is code: what stands between two grave accents."""
    found = re.split(r"`([^`]*)`", text)
    return [(part, bool(place % 2)) for place, part in enumerate(found) if part]


def in_html(page: Page, images: Mapping[str, bytes] | None = None, title: str = TITLE) -> str:
    """The page as one HTML file that needs no network. `images`: the PNG of each figure, by its file's name."""
    import base64

    from sinkscope.present.html.page import render_page

    inside = {name: base64.b64encode(content).decode() for name, content in (images or {}).items()}
    return render_page(
        "claims.html", ("page.css",), (), images=True, page=page, title=title, parts=parts, inside=inside
    )
