"""How a request says that sequences of text begin: the ways of BOS, other first tokens, tokens put before them.

What reads texts needs these names without the record of a request and the library that checks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sinkscope.errors import SinkscopeError

BOS_MODES = ("auto", "always", "never")
NAMED = ("auto", "bos", "none", "random")
MOST_REPEATS = 64
"""Most times that `bosxN` puts BOS at the start."""


@dataclass(frozen=True)
class Opening:
    """What stands before the text of each sequence.

    Attributes:
        first: `auto` (the tokenizer's own special tokens), `bos`, `bosxN` (BOS N times), `none`, `random` (one ordinary
            token, drawn for each sequence), or a text that is one token.
        prepend: number of ordinary tokens that are drawn for each sequence and stand before `first`. They are the same
            under every `first`.
    """

    first: str = "auto"
    prepend: int = 0

    def named(self, several: tuple[bool, bool]) -> str:
        """The end of a domain's name. `several`: whether a scan has several `first`, and several `prepend`."""
        plain = self.first in NAMED or repeats(self.first) is not None
        shown = self.first if plain else f"'{self.first}'"
        return (f" first={shown}" if several[0] else "") + (f" prepend={self.prepend}" if several[1] else "")


def check_opening(opening: Opening) -> None:
    """Raises SinkscopeError for an opening that is wrong for every tokenizer."""
    times = repeats(opening.first)
    if not opening.first:
        raise SinkscopeError(f"--first '': give one of {', '.join(NAMED)}, bosxN, or a text that is one token")
    if times is not None and not 1 <= times <= MOST_REPEATS:
        raise SinkscopeError(f"--first {opening.first}: BOS can stand there 1 to {MOST_REPEATS} times")
    if opening.prepend < 0:
        raise SinkscopeError(f"--prepend {opening.prepend}: a number of tokens is needed, 0 for none")


def openings(first: Sequence[str], prepend: Sequence[int]) -> list[Opening]:
    """Every combination, in the order given; `auto` and 0 stand where nothing is given."""
    return [Opening(*pair) for pair in product(first or ("auto",), prepend or (0,))]


def no_verdict(first: Sequence[str], prepend: Sequence[int]) -> str | None:
    """Why `--measure first` can give no verdict over these openings, whatever the tokenizer; None where it may.

    A verdict compares BOS at a later position with another token at position 0. `auto` may be either.
    """
    opened = openings(first, prepend)
    may_be_bos = [opening for opening in opened if opening.first == "auto" or repeats(opening.first) is not None]
    if all(repeats(opening.first) is not None for opening in opened):
        return "every text is read with BOS; give --first random as well"
    if not any(opening.prepend or (repeats(opening.first) or 1) > 1 for opening in may_be_bos):
        return "BOS never stands at a later position; give --first bos --prepend 0 --prepend 8 as well"
    return None


def repeats(first: str) -> int | None:
    """How many times `first` puts BOS at the start; None for any other opening."""
    match = re.fullmatch(r"bos(?:x(\d{1,4}))?", first)
    return None if match is None else int(match[1] or 1)
