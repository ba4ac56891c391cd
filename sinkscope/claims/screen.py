"""Verdicts on one screen of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sinkscope.claims.claim import FAILS, HOLDS, IN_PART, NOT_TESTED, Claim
from sinkscope.claims.findings import CONTRAST, DECIDING, VERDICT, number_of
from sinkscope.present.numbers import fixed, significant
from sinkscope.present.text import printable, shortened

WIDTH, BESIDE = 80, 4
"""Columns of the screen, and how many subjects stand beside each other."""
CELL = 13
NARROW = 20
"""Columns of the numbers at least, where a package has a claim with a long name."""
SHORT = {HOLDS: "holds", IN_PART: "in part", FAILS: "fails", NOT_TESTED: "-"}


def render_claims(table: pd.DataFrame, claims: Sequence[Claim]) -> str:
    """The verdict of each claim with its deciding number: in words for one subject, side by side for several."""
    subjects = list(dict.fromkeys(table["subject"]))
    render = _one if len(subjects) == 1 else _several
    return "\n".join([*render(table, claims, subjects), ""])


def _one(table: pd.DataFrame, claims: Sequence[Claim], subjects: list[str]) -> list[str]:
    lines = [shortened(printable(f"Claims put to {subjects[0]}"), WIDTH)]
    name, verdict = max(len(each.name) for each in claims) + 2, len(IN_PART) + 3
    for paper, own in _by_paper(claims):
        lines += ["", paper]
        for claim in own:
            room = max(NARROW, WIDTH - name - verdict - 2)
            told = textwrap.wrap(printable(_told(table, claim, subjects[0])), room) or [""]
            judged = _row(table, claim, subjects[0], VERDICT).shown
            lines.append(f"  {claim.name:<{name}}{judged:<{verdict}}{told[0]}".rstrip())
            lines += [" " * (2 + name + verdict) + more for more in told[1:]]
    return [*lines, "", "after /: the contrast, which would be similar if the claim said nothing"]


def _several(table: pd.DataFrame, claims: Sequence[Claim], subjects: list[str]) -> list[str]:
    lines = []
    name = max(len(each.name) for each in claims) + 1
    for start in range(0, len(subjects), BESIDE):
        chosen = subjects[start : start + BESIDE]
        signs = [chr(ord("A") + subjects.index(each)) if len(subjects) < 27 else "" for each in chosen]
        lines += [shortened(printable(f"{sign}: {each}"), WIDTH) for sign, each in zip(signs, chosen, strict=True)]
        lines.append((" " * name + "".join(f"{sign:<{CELL}}" for sign in signs)).rstrip())
        for paper, own in _by_paper(claims):
            lines.append(paper)
            for claim in own:
                cells = [_cell(table, claim, subject) for subject in chosen]
                lines.append((f"{claim.name:<{name}}" + "".join(f"{cell:<{CELL}}" for cell in cells)).rstrip())
        lines.append("")
    return [*lines, "-: not tested; --out FOLDER writes why, and every number"]


def _by_paper(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """The claims of each paper, below its name."""
    papers = dict.fromkeys(each.paper for each in claims)
    own = {paper: [each for each in claims if each.paper == paper] for paper in papers}
    return [(f"{paper_name(paper, rows)}", rows) for paper, rows in own.items()]


def paper_name(paper: str, claims: Sequence[Claim]) -> str:
    """How a paper is called: its first author and number, as its claims name them."""
    return f"{min((each.by for each in claims), key=len)} {paper}"


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
    found = table[(table["claim"] == claim.name) & (table["subject"] == subject) & (table["row"] == row)]
    return None if found.empty else next(found.itertuples())
