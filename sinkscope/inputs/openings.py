"""How sequences of text begin: the tokenizer's own special tokens, another first token, tokens put before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.rules import TokenRules, check_ids, encode, ordinary_tokens

NAMED = ("auto", "bos", "none", "random")
ESCAPES = {"\\n": "\n", "\\t": "\t"}
SHOWN = 6
"""Most tokens that an error spells."""
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
        plain = self.first in NAMED or _repeats(self.first) is not None
        shown = self.first if plain else f"'{self.first}'"
        return (f" first={shown}" if several[0] else "") + (f" prepend={self.prepend}" if several[1] else "")


def check_opening(opening: Opening) -> None:
    """Raises SinkscopeError for an opening that is wrong for every tokenizer."""
    repeats = _repeats(opening.first)
    if not opening.first:
        raise SinkscopeError(f"--first '': give one of {', '.join(NAMED)}, bosxN, or a text that is one token")
    if repeats is not None and not 1 <= repeats <= MOST_REPEATS:
        raise SinkscopeError(f"--first {opening.first}: BOS can stand there 1 to {MOST_REPEATS} times")
    if opening.prepend < 0:
        raise SinkscopeError(f"--prepend {opening.prepend}: a number of tokens is needed, 0 for none")


def openings(first: Sequence[str], prepend: Sequence[int]) -> list[Opening]:
    """Every combination, in the order given; `auto` and 0 stand where nothing is given."""
    return [Opening(*each) for each in product(first or ("auto",), prepend or (0,))]


def opening_tokens(opening: Opening, tokenizer: Any, rules: TokenRules, rows: int, seed: int) -> np.ndarray:
    """The tokens that stand before each of `rows` texts, [rows, tokens].

    Raises SinkscopeError where the tokenizer has no BOS token that `first` needs, or makes several tokens of its text.
    """
    generator = np.random.default_rng([seed, 7])  # any number of its own, so that no other draw repeats these
    # Drawn first and at full length, whatever `first` is: all openings of a sequence share them.
    before = generator.choice(ordinary_tokens(rules), (rows, opening.prepend)) if opening.prepend else _none(rows)
    first = _first_tokens(opening.first, tokenizer, rules, rows, np.random.default_rng([seed, 11]))
    return np.concatenate([before, first], axis=1)


def _first_tokens(
    first: str, tokenizer: Any, rules: TokenRules, rows: int, generator: np.random.Generator
) -> np.ndarray:
    if first == "none":
        return _none(rows)
    if first == "random":
        return generator.choice(ordinary_tokens(rules), (rows, 1))
    repeats = _repeats(first)
    if first == "auto":
        ids = rules.prefix
    elif repeats is not None:
        if rules.bos_id is None:
            raise SinkscopeError(f"--first {first}: the tokenizer has no BOS token; give none, random or a token")
        ids = [rules.bos_id] * repeats
    else:
        ids = [_one_token(first, tokenizer)]
    check_ids(ids, rules.vocabulary, f"--first {first}")
    return np.tile(np.array(ids, dtype=np.int64), (rows, 1))


def _one_token(text: str, tokenizer: Any) -> int:
    """The token of a text, or the token that the vocabulary spells so."""
    if tokenizer is None:
        raise SinkscopeError(f"--first '{text}': the model has no tokenizer that could make a token of it")
    written = text
    for escape, character in ESCAPES.items():
        written = written.replace(escape, character)
    ids = encode(tokenizer, written, False)
    if len(ids) == 1:
        return ids[0]
    spelled = tokenizer.get_vocab().get(text)
    if spelled is not None:
        return int(spelled)
    made = f"{len(ids)} tokens of it ({_spelled(ids, tokenizer)})" if ids else "no token of it"
    raise SinkscopeError(
        f"--first '{text}': the tokenizer makes {made}; give a text that is one token, or a token as the vocabulary "
        "spells it"
    )


def _spelled(ids: list[int], tokenizer: Any) -> str:
    """The first few tokens, as the vocabulary spells them."""
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids[:SHOWN])]
    return ", ".join([*pieces, *(["..."] if len(ids) > SHOWN else [])])


def _repeats(first: str) -> int | None:
    found = re.fullmatch(r"bos(?:x(\d{1,4}))?", first)
    return None if found is None else int(found[1] or 1)


def _none(rows: int) -> np.ndarray:
    return np.empty((rows, 0), dtype=np.int64)
