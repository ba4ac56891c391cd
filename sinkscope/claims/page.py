"""Verdicts on one screen, as a page in Markdown and in HTML, and the figures beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.claims.claim import FAILS, HOLDS, IN_PART, NOT_TESTED, Claim, NotTested
from sinkscope.claims.findings import CONTRAST, DECIDING, FIGURE, VERDICT, number_of
from sinkscope.claims.needs import TEXT
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.present.numbers import fixed, significant
from sinkscope.present.text import markdown_cell, printable, screen_width, shortened, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.claims.subject import Subject
    from sinkscope.runs.run import Run


BESIDE = 4
"""Columns of the screen, and how many subjects stand beside each other."""
CELL = 13
NARROW = 20
"""Columns of the numbers at least, where a package has a claim with a long name."""
SHORT = {HOLDS: "holds", IN_PART: "in part", FAILS: "fails", NOT_TESTED: "-"}


AFTER = "After /: the contrast. If the claim told nothing about the model, both numbers would be similar."
ERRORS = "±: standard error. In brackets: 95 % interval."


def render_claims(table: pd.DataFrame, claims: Sequence[Claim], folder: Path | None = None) -> str:
    """The verdict of each claim with its deciding number: in words for one subject, side by side for several.

    `folder`: where the page was written, if it was.
    """
    subjects = list(dict.fromkeys(table["subject"]))
    lines = _one(table, claims, subjects) if len(subjects) == 1 else _several(table, claims, subjects, folder)
    return "\n".join([*lines, ""])


def _one(table: pd.DataFrame, claims: Sequence[Claim], subjects: list[str]) -> list[str]:
    lines = [shortened(printable(f"Claims put to {subjects[0]}"), screen_width())]
    name, verdict = max(len(claim.name) for claim in claims) + 2, len(IN_PART) + 3
    for paper, group in _by_paper(claims):
        lines += ["", *wrapped(paper, rest="  ")]
        for claim in group:
            room = max(NARROW, screen_width() - name - verdict - 2)
            told = wrapped(printable(_told(table, claim, subjects[0])), room) or [""]
            judged = _row(table, claim, subjects[0], VERDICT).shown
            lines.append(f"  {claim.name:<{name}}{judged:<{verdict}}{told[0]}".rstrip())
            lines += [" " * (2 + name + verdict) + more for more in told[1:]]
    return [*lines, "", *wrapped(AFTER), *wrapped(ERRORS)]


def _several(table: pd.DataFrame, claims: Sequence[Claim], subjects: list[str], folder: Path | None) -> list[str]:
    lines = []
    name = max(len(claim.name) for claim in claims) + 1
    for start in range(0, len(subjects), BESIDE):
        chosen = subjects[start : start + BESIDE]
        signs = [chr(ord("A") + subjects.index(subject)) if len(subjects) < 27 else "" for subject in chosen]
        lines += [
            shortened(printable(f"{sign}: {subject}"), screen_width())
            for sign, subject in zip(signs, chosen, strict=True)
        ]
        lines.append((" " * name + "".join(f"{sign:<{CELL}}" for sign in signs)).rstrip())
        for paper, group in _by_paper(claims):
            lines.append(paper)
            for claim in group:
                cells = [_cell(table, claim, subject) for subject in chosen]
                lines.append((f"{claim.name:<{name}}" + "".join(f"{cell:<{CELL}}" for cell in cells)).rstrip())
        lines.append("")
    told = "--out FOLDER writes" if folder is None else f"{folder / 'claims.md'} says"
    return [
        *lines,
        *wrapped(f"-: not tested. The number decided the verdict; {told} what it is, its error and contrast."),
    ]


def _by_paper(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """The claims of each paper, below its name."""
    papers = dict.fromkeys(claim.paper for claim in claims)
    groups = {paper: [claim for claim in claims if claim.paper == paper] for paper in papers}
    return [(f"{paper_name(paper, rows)}", rows) for paper, rows in groups.items()]


def paper_name(paper: str, claims: Sequence[Claim]) -> str:
    """How a paper is called: its first author and number, as its claims name them."""
    return f"{min((claim.by for claim in claims), key=len)} {paper}"


def _told(table: pd.DataFrame, claim: Claim, subject: str) -> str:
    deciding, contrast = (_row(table, claim, subject, row) for row in (DECIDING, CONTRAST))
    if deciding is None:
        return str(_row(table, claim, subject, VERDICT).quantity)
    against = "" if contrast is None else f" / {contrast.shown}"
    return f"{number_of(deciding).told}{against}"


def _cell(table: pd.DataFrame, claim: Claim, subject: str) -> str:
    deciding = _row(table, claim, subject, DECIDING)
    judged = SHORT[_row(table, claim, subject, VERDICT).shown]
    if deciding is None:
        return judged
    value = abs(deciding.value)
    return f"{judged} {fixed(deciding.value, 2) if value < 10 else significant(deciding.value, 3)}"


def _row(table: pd.DataFrame, claim: Claim, subject: str, row: str) -> Any:
    """The one row of this kind; None where there is none."""
    rows = table[(table["claim"] == claim.name) & (table["subject"] == subject) & (table["row"] == row)]
    return None if rows.empty else next(rows.itertuples())


# Verdicts as a page, in Markdown and in HTML, made of the same parts.


PAGE_WIDTH = 120
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
    overview += [
        [claim.title, claim.by, *(_verdict(table, claim, subject) for subject in subjects)] for claim in claims
    ]
    papers: dict[str, list[Section]] = {}
    drawn: set[str] = set()
    for claim in claims:
        group = [each for each in claims if each.paper == claim.paper]
        figure = None if claim.figure in drawn else (figures or {}).get(claim.figure)
        drawn |= {claim.figure} if figure else set()
        papers.setdefault(paper_name(claim.paper, group), []).append(
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
    first = text.split()[0].rstrip(".;:")
    symbol = not first.isalpha() or (len(first) == 1 and first != "a")
    return text if symbol else text[:1].upper() + text[1:]


def _numbers(table: pd.DataFrame, claim: Claim, subjects: list[str]) -> list[list[str]]:
    """Verdict, deciding number, contrast and further numbers down, subjects across."""
    rows = [["", *subjects], ["verdict", *(_verdict(table, claim, subject) for subject in subjects)]]
    for kind, label in ((DECIDING, ""), (CONTRAST, "contrast: "), (FIGURE, "")):
        numbers = table[(table["claim"] == claim.name) & (table["row"] == kind)]
        for quantity in dict.fromkeys(numbers["quantity"]):
            by_subject = numbers[numbers["quantity"] == quantity].set_index("subject")
            cells = [
                number_of(by_subject.loc[subject]).told if subject in by_subject.index else "-" for subject in subjects
            ]
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
                lines += [*wrapped(f"{start}{_markdown(text)}", PAGE_WIDTH), ""]
            lines += [*_markdown_table(section.table), ""]
            if section.figure:
                file, caption = section.figure
                lines += [f"![{_markdown(caption)}]({file})", ""]
    return "\n".join(lines)


def _markdown_table(rows: list[list[str]]) -> list[str]:
    lines = [[_markdown(cell) for cell in row] for row in rows]
    has_numbers = any(cell.lstrip("-")[:1].isdigit() for row in rows[1:] for cell in row[1:])
    lines.insert(1, ["---", *["---:" if has_numbers else "---"] * (len(rows[0]) - 1)])
    return [("| " + " | ".join(line) + " |").replace("|  |", "| |") for line in lines]


def _markdown(text: str) -> str:
    return "".join(
        f"`{printable(part).replace('|', chr(92) + '|')}`" if code else markdown_cell(part)
        for part, code in parts(text)
    )


def parts(text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it is code: what stands between two grave accents."""
    pieces = re.split(r"`([^`]*)`", text)
    return [(part, bool(place % 2)) for place, part in enumerate(pieces) if part]


def in_html(page: Page, images: Mapping[str, bytes] | None = None, title: str = TITLE) -> str:
    """The page as one HTML file that needs no network. `images`: the PNG of each figure, by its file's name."""
    import base64

    from sinkscope.present.html.page import render_page

    inside = {name: base64.b64encode(content).decode() for name, content in (images or {}).items()}
    return render_page(
        "claims.html", ("page.css",), (), images=True, page=page, title=title, parts=parts, inside=inside
    )


# The figures that go with claims, over the runs of all subjects.


def draw_figures(
    claims: Sequence[Claim], subjects: Sequence[Subject]
) -> tuple[dict[str, bytes], dict[str, tuple[str, str]], list[str]]:
    """The PNG of each figure by its file's name; file and caption by the figure's name; why others were not drawn.

    A figure shows those runs that hold its tables.
    """
    from sinkscope.present.figures.several import draw_several, table_figures

    images: dict[str, bytes] = {}
    captions: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for name in dict.fromkeys(claim.figure for claim in claims if claim.figure):
        tables = table_figures()[name].tables if name in table_figures() else ()
        runs = [run for run in map(_run, subjects) if run is not None and {*tables} <= {*run.measured}]
        file = f"claims-{name}.png"
        drawable = [run for run in runs if _can_be_drawn(run, name, left_out)] if len(runs) > 1 else runs
        try:
            if drawable:
                images[file], caption = draw_several(drawable, name, "png", "page")
                captions[name] = (file, caption)
        except SinkscopeError as error:
            left_out.append(f"figure {name} is not drawn: {in_one_line(error)}")
    return images, captions, left_out


def _can_be_drawn(run: Run, name: str, left_out: list[str]) -> bool:
    """Whether a figure of the run alone can be drawn; else says why it is left out of the figure."""
    from sinkscope.present.figures.several import draw_several

    try:
        draw_several([run], name, "svg", "page")
    except SinkscopeError as error:
        left_out.append(f"figure {name}: {in_one_line(error)}")
        return False
    return True


def _run(subject: Subject) -> Run | None:
    """The run over text; None where there is none."""
    try:
        return TEXT.of(subject).run
    except NotTested:
        return None
