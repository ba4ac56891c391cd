"""Whether two corpora read the same documents, sequence by sequence, so that their sequences make pairs."""

from __future__ import annotations

from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.documents import origin
from sinkscope.inputs.passages import Passage, overlap


def same_documents(a: Corpus, b: Corpus, count: int) -> bool:
    """Whether the first `count` sequences of two corpora read the same documents, one by one.

    Documents are the same where their content is, whatever their files are called; windows of one text must overlap.
    Two columns of one file are a pair row by row. Equal names in different files say nothing.
    """
    rows = origin(a.source) == origin(b.source) and a.pieces[:count] == b.pieces[:count]
    if not (a.passages and b.passages):
        return rows
    return all(
        len(first) == len(second) and all(_matched(x, y, rows) for x, y in zip(first, second, strict=True))
        for first, second in zip(a.passages[:count], b.passages[:count], strict=True)
    )


def _matched(a: Passage, b: Passage, rows: bool) -> bool:
    return overlap(a, b) if a.document == b.document else rows
