"""The answers of a run in sentences, each below the name of what it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


def answers(run: Run) -> list[tuple[str, list[str]]]:
    """The answers, each below its name: of each stream; of each domain where there are several, since a mean over
    different kinds of text answers nothing."""
    summary = run.summary
    if not summary.domains:
        return [(stream, each.in_words) for stream, each in summary.streams.items()]
    return [
        (domain if len(entry.streams) == 1 else f"{domain}, {stream}", each.in_words)
        for domain, entry in summary.domains.items()
        for stream, each in entry.streams.items()
    ]
