"""The papers that sources cite: the source of every column is parsed correctly."""

from __future__ import annotations

import re

import pytest

from sinkscope.present.terminal.metrics import metric_list
from sinkscope.runs.papers import PAPERS, Paper, cited_papers, published_numbers

SOURCES = sorted(
    {column["source"] for column in metric_list([])} | {each.number.source for each in published_numbers()}
)


@pytest.mark.parametrize("source", SOURCES)
def test_every_number_of_a_source_is_a_known_paper(source: str) -> None:
    """A number is looked for without the parser's own rule, and an author that the source names is the paper's."""
    numbers = re.findall(r"\d+\.\d{3,}", source)
    assert [paper.arxiv for paper in cited_papers(source)] == list(dict.fromkeys(numbers))
    assert set(numbers) <= set(PAPERS)
    for author, number in re.findall(r"([A-Z][\w-]+) et al\.,? (\d{4}\.\d{5})", source):
        assert PAPERS[number].first_author == author


def test_the_sources_of_metrics_cite_papers() -> None:
    """Most do; this keeps the test above from passing over an empty list."""
    cited = {paper for source in SOURCES for paper in cited_papers(source)}
    assert cited == set(PAPERS.values())


def test_an_unknown_number_is_a_paper_without_an_author() -> None:
    assert cited_papers("someone 2401.12345, 2401.12345 again, 1.23456 and 2413.12345") == (Paper("2401.12345"),)
    assert cited_papers("ours") == ()
    assert (Paper("2401.12345").year, Paper("2401.12345").url) == (2024, "https://arxiv.org/abs/2401.12345")
