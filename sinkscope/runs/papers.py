"""The papers that define metrics, and the reading of citations in a metric's source."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Attributes:
        arxiv: its arXiv number, such as `2410.10781`.
        first_author: the family name of its first author; None for a paper that PAPERS does not hold.
    """

    arxiv: str
    first_author: str | None = None

    @property
    def year(self) -> int:
        """The year of its first version, read from the number."""
        return 2000 + int(self.arxiv[:2])

    @property
    def url(self) -> str:
        """Address of its abstract."""
        return f"https://arxiv.org/abs/{self.arxiv}"


PAPERS = {
    paper.arxiv: paper
    for paper in (
        Paper("2306.12929", "Bondarenko"),
        Paper("2309.17453", "Xiao"),
        Paper("2402.17762", "Sun"),
        Paper("2410.10781", "Gu"),
        Paper("2410.10819", "Xiao"),
        Paper("2410.13835", "Guo"),
        Paper("2410.13846", "Zhang"),
        Paper("2410.17174", "Kaul"),
        Paper("2411.07191", "Yu"),
        Paper("2503.22329", "Owen"),
        Paper("2504.02732", "Barbero"),
        Paper("2504.03889", "Sandoval-Segura"),
        Paper("2510.06477", "Queipo-de-Llano"),
        Paper("2512.22213", "Wong"),
        Paper("2603.05498", "Sun"),
        Paper("2605.08453", "Lampert"),
    )
}
"""Every paper that is the source of a metric or of a published number, by arXiv number."""

NUMBER = re.compile(r"\b\d{2}(?:0[1-9]|1[0-2])\.\d{5}\b")
"""An arXiv number since 2015: year, month, five digits."""


def cited_papers(source: str) -> tuple[Paper, ...]:
    """The papers that a source such as `Gu et al. 2410.10781 table 1` cites, in order of appearance, each once."""
    return tuple(PAPERS.get(number, Paper(number)) for number in dict.fromkeys(NUMBER.findall(source)))
