"""Reads facts about token ids: special tokens around a text, ids that exist, ids that may be drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, first_line


class NoTokenizer(SinkscopeError):
    """Text is to be read, and there is no tokenizer. The caller may know why."""


PROBES = 1000
"""Tokens that are tried at the most where a tokenizer makes nothing of Latin letters."""


@dataclass(frozen=True)
class TokenRules:
    """The special tokens around a text, the ids that the model has, and those that may be drawn at random."""

    prefix: list[int]
    suffix: list[int]
    bos_id: int | None
    special: frozenset[int]
    vocabulary: int
    drawable: int


def token_rules(tokenizer: Any, vocabulary: int) -> TokenRules:
    """Finds the tokenizer's special tokens by encoding a probe with and without them.

    `vocabulary`: rows of the model's embedding; ids at or above it are refused. `tokenizer` may be None (ids only).
    `drawable`: ids below it may be drawn at random; a padded embedding has rows that stand for no token.
    """
    if tokenizer is None:
        return TokenRules([], [], None, frozenset(), vocabulary, vocabulary)
    probe = next((text for text in _probes(tokenizer) if encode(tokenizer, text, False)), "")
    body, full = encode(tokenizer, probe, False), encode(tokenizer, probe, True)
    starts = [i for i in range(len(full) - len(body) + 1) if full[i : i + len(body)] == body]
    prefix, suffix = (full[: starts[0]], full[starts[0] + len(body) :]) if starts else ([], [])
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    special = frozenset(tokenizer.all_special_ids)
    return TokenRules(prefix, suffix, bos, special, vocabulary, min(vocabulary, len(tokenizer)))


def _probes(tokenizer: Any) -> Iterator[str]:
    """Texts of which a tokenizer may make tokens: one in Latin letters, then its own tokens, for another alphabet."""
    yield "A probe text."
    special = frozenset(tokenizer.all_special_ids)
    yield from (tokenizer.decode([token]) for token in range(min(len(tokenizer), PROBES)) if token not in special)


def ordinary_tokens(rules: TokenRules) -> np.ndarray:
    """The ids that may be drawn at random: none is special. Raises SinkscopeError where there are none."""
    ordinary = np.array([token for token in range(rules.drawable) if token not in rules.special], dtype=np.int64)
    if not ordinary.size:
        raise SinkscopeError("the tokenizer has special tokens only: none can be drawn at random")
    return ordinary


def check_ids(ids: Sequence[int], vocabulary: int, name: str) -> None:
    """Raises SinkscopeError where an id has no row in the model's embedding."""
    if any(not 0 <= token < vocabulary for token in ids):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise SinkscopeError(f"{name}: token id {wrong} is outside the model's vocabulary 0..{vocabulary - 1}")


def check_characters(text: str, name: str) -> None:
    """Raises SinkscopeError for text with a lone surrogate, half of a character: no tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SinkscopeError(
            f"{name} holds \\u{ord(text[error.start]):04x}, a lone surrogate, which is no character (at "
            f"{error.start}): mend the text"
        ) from None


def encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Returns the tokenizer's ids of a text.

    Raises SinkscopeError where the text holds a lone surrogate, and where the tokenizer fails: its files may hold
    anything.
    """
    check_characters(text, "the text")
    try:
        ids = tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]
        return [int(token) for token in ids]
    except SinkscopeError:
        raise
    except Exception as error:
        raise SinkscopeError(
            f"the checkpoint's tokenizer, {type(tokenizer).__name__}, fails on text ({first_line(error)}): mend its "
            "files, or give token ids"
        ) from None


def token_text(tokenizer: Any, token: int) -> str:
    """The token as the vocabulary spells it; its id where there is no tokenizer. Raises SinkscopeError where the
    tokenizer fails."""
    if tokenizer is None:
        return str(token)
    try:
        return str(tokenizer.convert_ids_to_tokens(token))
    except Exception as error:
        raise SinkscopeError(f"the checkpoint's tokenizer cannot spell token {token}: {first_line(error)}") from None


def shared_tokens(ids: np.ndarray, tokenizer: Any) -> list[str | None]:
    """The token at each position where every sequence of `ids` [sequence, T] has the same one; None elsewhere."""
    same = (ids == ids[0]).all(0) & (ids[0] >= 0)
    return [token_text(tokenizer, int(token)) if s else None for token, s in zip(ids[0], same, strict=True)]


def first_token(ids: list[np.ndarray], rules: TokenRules, tokenizer: Any) -> dict[str, Any]:
    """Id and text of the first token where all sequences share it, and whether it is the tokenizer's BOS (or CLS)."""
    firsts = np.unique(np.concatenate([sequences[:, 0] for sequences in ids]))
    if len(firsts) > 1:
        return {"id": None, "text": None, "distinct": len(firsts), "is_bos": None if rules.bos_id is None else False}
    token = int(firsts[0])
    is_bos = rules.bos_id == token if rules.bos_id is not None else None
    return {"id": token, "text": token_text(tokenizer, token), "distinct": 1, "is_bos": is_bos}
