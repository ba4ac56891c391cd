"""A paper's table as Markdown, and the sources of its metrics as BibTeX."""

from __future__ import annotations

from sinkscope.present.paper.cells import Writing, written_rows
from sinkscope.present.text import markdown_cell, printable
from sinkscope.runs.paper_table import PaperTable, arxiv_sources


def markdown_table(table: PaperTable) -> str:
    """A GitHub table; cells are `mean ± half width` of the 95 % interval."""
    heads = [markdown_cell(key) for key in table.keys]
    heads += [
        f"{markdown_cell(c.name)} ({markdown_cell(c.unit)})" if c.unit else markdown_cell(c.name) for c in table.columns
    ]
    marks = ["---"] * len(table.keys) + ["---:"] * len(table.columns)
    lines = [_line(heads), _line(marks)]
    lines += [_line(cells) for cells in written_rows(table, Writing(markdown_cell, "-", " ± "))]
    notes = "; ".join(markdown_cell(note) for note in table.notes)
    return "\n".join([*lines, "", f"± is the half width of the 95 % interval over sequences. {notes}", ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bibtex(table: PaperTable, version: str) -> str:
    """An entry for each arXiv paper that the metrics' sources name, and one for sinkscope. Titles are not known."""
    papers, others = arxiv_sources(table)
    lines = [f"% {name}: {printable(source) or 'no source'}" for name, source in others.items()]
    for number, paper in papers.items():
        fields = {
            "author": f"{paper['author']} and others" if paper["author"] else None,
            "year": f"20{number[:2]}",
            "eprint": number,
            "archivePrefix": "arXiv",
            "url": f"https://arxiv.org/abs/{number}",
            "note": "defines " + ", ".join(name.replace("_", r"\_") for name in paper["metrics"]),
        }
        lines.append(_entry("misc", f"arxiv{number.replace('.', '-')}", fields))
    fields = {"title": "sinkscope: measures attention sinks in pretrained transformers", "version": version}
    return "\n".join([*lines, _entry("software", "sinkscope", fields), ""])


def _entry(kind: str, key: str, fields: dict[str, str | None]) -> str:
    body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value)
    return f"@{kind}{{{key},\n{body}\n}}"
