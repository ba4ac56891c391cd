"""The errors that a user reads: one sentence says what is wrong and what to do. The command line then exits with 2."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from difflib import SequenceMatcher


class SinkscopeError(Exception):
    """A problem that the user can fix: a wrong name, a damaged file, unsuitable data. One line, no traceback."""


class OutOfMemory(SinkscopeError):
    """A device ran out of memory. Other processes of the same launch may have had enough."""


def in_one_line(error: Exception) -> str:
    """Returns the error as one line for stderr."""
    if isinstance(error, SinkscopeError):
        if error.__cause__ is not None and os.environ.get("SINKSCOPE_TRACEBACK"):
            traceback.print_exception(error.__cause__)
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: try a smaller --seq-len or --batch-size"
    if isinstance(error, OSError):
        return (error.strerror or first_line(error)) + (f": {error.filename}" if error.filename else "")
    if os.environ.get("SINKSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, ImportError):
        return (
            f"a library cannot be imported: {first_line(_cause(error))}; install releases of torch, torchvision and "
            "transformers that fit together, as pip does in a fresh environment (SINKSCOPE_TRACEBACK=1 shows where)"
        )
    detail = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {detail} (SINKSCOPE_TRACEBACK=1 shows where)"


def _cause(error: BaseException) -> BaseException:
    """The error that all others came of: a library's lazy import hides what failed behind one of its own."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, cut to 200 characters, without its class."""
    return shorten(_said(error).splitlines()[0])


def all_lines(error: BaseException) -> str:
    """All that an error of another library says, in one line, cut to 200 characters, without its class."""
    return shorten(" ".join(_said(error).split()))


_CLASS = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")
"""The class of an error that was raised inside another, as libraries put it into their text."""


def _said(error: BaseException) -> str:
    try:
        said = _CLASS.sub("", str(error)).strip()
        if said and isinstance(error, KeyError):  # it says the key alone
            said += " is missing"
        return said or "it gives no reason"
    except Exception:  # its class may fail at that too
        return "it gives no reason"


def is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8. Python reads the other bytes of a path as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning with three dots where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


SUGGESTED, FAR = 3, 0.4
"""Most names that an error suggests, and the distance from which on a name is not suggested."""


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean X or Y?` for a name that is near known ones, in any case; empty where none is near. `before`
    stands in front of each name that is suggested.

    Nearest are names that hold all its words (`bos` and `bos_mass`), the shortest first; then names spelled alike, or
    with a word spelled alike. It ends a sentence.
    """
    name = str(name)  # a program may ask for anything
    folded = name.casefold()
    distances = {term: _distance(folded, term.casefold()) for term in known}
    near = sorted((term for term in distances if distances[term] < FAR), key=lambda term: (distances[term], term))
    shown = [f"{before}{term}" for term in near[:SUGGESTED]]
    return f"; did you mean {', '.join(shown[:-1])}{' or ' if len(shown) > 1 else ''}{shown[-1]}?" if shown else ""


def _distance(given: str, known: str) -> float:
    """From 0, the same name, to 1, nothing alike; past FAR where the two are no slip of one another."""
    words, known_words = re.split(r"[-_/ ]", given), re.split(r"[-_/ ]", known)
    if (given and set(words) <= set(known_words)) or (len(given) > 3 and given in known):
        return 0.1 * (1 - len(given) / len(known))
    alike = SequenceMatcher(None, given, known).ratio()
    word = max(SequenceMatcher(None, given, known_word).ratio() for known_word in known_words)
    return min(1 - alike, 1 - word + 0.2)
