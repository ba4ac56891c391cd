"""Records what was read of a document, known by its content, so that later sequences can leave it out."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sinkscope.errors import SinkscopeError


class NothingLeft(SinkscopeError):
    """The data hold no sequence that is not left out."""


class Passage(NamedTuple):
    """A stretch of one document, or all of it. JSON writes it as a list of three; `Passage(*row)` reads that.

    Attributes:
        document: SHA-256 of the document's content, in hexadecimal: of its text in UTF-8, or of its token ids as a JSON
            list. The document's name and file play no part.
        start, stop: first token and past the last, counted in the document's own tokens without special ones; stop
            None = to the end.
    """

    document: str
    start: int = 0
    stop: int | None = None


class LeftOut:
    """The passages that must not be read again.

    `without`: passages; or names of documents (`FILE[i]` for a window of a .txt), for runs that recorded only names. A
    passage is left out of every source, a name only of the source that is read.
    """

    def __init__(self, without: Collection[Passage | str] = ()) -> None:
        self.names = frozenset(name for name in without if isinstance(name, str))
        self._passages: dict[str, list[Passage]] = defaultdict(list)
        for passage in without:
            if not isinstance(passage, str):
                self._passages[passage.document].append(passage)

    def __len__(self) -> int:
        return len(self.names) + sum(map(len, self._passages.values()))

    def holds(self, name: str, passage: Passage) -> bool:
        """Whether a document of that name, or any token of the passage, is left out."""
        return name in self.names or any(
            overlap(passage, left_out) for left_out in self._passages.get(passage.document, ())
        )

    def reach(self, document: str) -> int | None:
        """Tokens from the document's start to the end of its last passage here; None where one has no `stop`."""
        stops = [passage.stop for passage in self._passages.get(document, ())]
        return None if None in stops else max((stop for stop in stops if stop is not None), default=0)


def text_fingerprint(text: str) -> str:
    """SHA-256 of a text in UTF-8; lone surrogates, which JSON may hold, are encoded too."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def ids_fingerprint(ids: Sequence[int]) -> str:
    """SHA-256 of token ids as a JSON list."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def overlap(a: Passage, b: Passage) -> bool:
    """Whether two passages of one document share a token."""
    return (b.stop is None or a.start < b.stop) and (a.stop is None or b.start < a.stop)
