"""The papers that define metrics, and which of them a metric's source cites."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Attributes:
        arxiv: its number, `2410.10781`.
        first_author: the family name of its first author; None for a paper that PAPERS does not hold.
    """

    arxiv: str
    first_author: str | None = None

    @property
    def year(self) -> int:
        """The year of its first version, which is in the number."""
        return 2000 + int(self.arxiv[:2])

    @property
    def url(self) -> str:
        """Where it can be read."""
        return f"https://arxiv.org/abs/{self.arxiv}"


PAPERS = {
    paper.arxiv: paper
    for paper in (
        Paper("2306.12929", "Bondarenko"),
        Paper("2402.17762", "Sun"),
        Paper("2410.10781", "Gu"),
        Paper("2410.13835", "Guo"),
        Paper("2410.17174", "Kaul"),
        Paper("2504.02732", "Barbero"),
        Paper("2504.03889", "Sandoval-Segura"),
        Paper("2510.06477", "Queipo-de-Llano"),
        Paper("2605.08453", "Lampert"),
    )
}
"""By arXiv number: every paper that a metric, or a published number, has as its source."""

NUMBER = re.compile(r"\b\d{2}(?:0[1-9]|1[0-2])\.\d{5}\b")
"""An arXiv number since 2015: year, month, five digits."""


def cited_papers(source: str) -> tuple[Paper, ...]:
    """The papers that a source such as `Gu et al. 2410.10781 table 1` cites, in its order, each once."""
    return tuple(PAPERS.get(number, Paper(number)) for number in dict.fromkeys(NUMBER.findall(source)))
