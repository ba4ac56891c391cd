"""The papers that define a table's metrics, as BibTeX."""

from __future__ import annotations

from sinkscope.present.paper.format import Format
from sinkscope.present.text import printable
from sinkscope.runs.defaults import VERSION
from sinkscope.runs.paper_table import PaperTable
from sinkscope.runs.papers import Paper, cited_papers

SOFTWARE = {
    "author": "{The sinkscope authors}",  # the braces keep the name whole
    "title": "sinkscope: measures attention sinks in pretrained transformers",
}
"""What CITATION.cff says too."""


def bibtex(table: PaperTable) -> str:
    """An entry for each arXiv paper that the metrics' sources cite, and one for sinkscope.

    A comment above each entry names the metrics that the paper defines; a note would be printed in the bibliography.
    Metrics whose source is no paper come last, in comments. Of a paper that a user's own metric alone cites, neither
    author nor title is known.
    """
    papers: dict[Paper, list[str]] = {}
    unpublished: dict[str, list[str]] = {}
    for column in table.columns:
        cited = cited_papers(column.source)
        for paper in cited:
            papers.setdefault(paper, []).append(column.name)
        if not cited:
            unpublished.setdefault(printable(column.source) or "no source", []).append(column.name)
    entries = [f"% defines {', '.join(names)}\n{_paper(paper)}" for paper, names in papers.items()]
    entries.append(_entry("misc", "sinkscope", SOFTWARE | {"howpublished": f"Version {VERSION}"}))
    return "\n".join([*entries, *(f"% {source}: {', '.join(names)}" for source, names in unpublished.items()), ""])


def _paper(paper: Paper) -> str:
    fields = {
        "author": paper.authors,
        "title": f"{{{paper.title}}}" if paper.title else None,  # the braces keep capitals
        "key": None if paper.first_author else paper.arxiv,
        "year": str(paper.year),
        "eprint": paper.arxiv,
        "archivePrefix": "arXiv",
        "url": paper.url,
    }
    return _entry("misc", f"arxiv{paper.arxiv.replace('.', '-')}", fields)


def _entry(kind: str, key: str, fields: dict[str, str | None] | dict[str, str]) -> str:
    """BibTeX sorts an entry without an author by the field `key`."""
    body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value)
    return f"@{kind}{{{key},\n{body}\n}}"


FORMAT = Format("bibtex", (".bib",), bibtex, sources=True)
