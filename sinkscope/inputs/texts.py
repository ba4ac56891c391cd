"""Reads a SPEC as what it holds: conversations through the chat template, text and token ids as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.chats import MOST_TOKENS, PADDING, REGIONS, read_chats
from sinkscope.inputs.corpus import Corpus, read_corpus
from sinkscope.inputs.documents import SYNTHETIC, Source, read_source
from sinkscope.inputs.rules import TokenRules

GENERATED, MARKERS, TEXT = (REGIONS.index(name) for name in ("generated", "markers", "text"))


def holds_chats(spec: str) -> Source | None:
    """The source of a SPEC that holds conversations; None for any other."""
    if spec in SYNTHETIC or spec.partition("#")[0].endswith(".txt"):
        return None
    source = read_source(spec)
    return source if any(document.messages is not None for document in source.documents) else None


def read_chats_or_text(
    spec: str, tokenizer: Any, rules: TokenRules, seq_len: int | None, default: int, limit: int | None, wanted: int,
    bos: str, seed: int, goes_on: bool,
) -> Corpus:  # fmt: skip
    """Reads conversations or text. `seq_len`: tokens as asked; None = `default` for text, at most MOST_TOKENS and the
    model's `limit` for conversations. `goes_on`: the model will write after it."""
    chats = holds_chats(spec)
    if chats is None:
        return read_corpus(spec, tokenizer, rules, seq_len or default, wanted, bos, seed)
    if bos != "auto":
        raise SinkscopeError(f"--bos {bos}: in conversations ({spec}) the chat template decides what stands first")
    most = seq_len or min(MOST_TOKENS, limit or MOST_TOKENS)
    return read_chats(chats, tokenizer, rules, most, wanted, seed, goes_on)


def continued(corpus: Corpus, rules: TokenRules, write: Callable[[list[int]], list[int]]) -> Corpus:
    """The corpus with what `write` makes of each sequence after it, in the region `generated`.

    Sequences of text get regions too: special tokens are markers. Raises SinkscopeError where nothing is written.
    """
    rows, regions = [], []
    for number, row in enumerate(corpus.ids):
        prompt = row[row != PADDING].tolist()
        answer = write(prompt)
        known = _of_text(prompt, rules) if corpus.regions is None else corpus.regions[number, : len(prompt)].tolist()
        rows.append([*prompt, *answer])
        regions.append([*known, *[GENERATED] * len(answer)])
    if all(GENERATED not in row for row in regions):
        raise SinkscopeError(f"--generate: the model ends at once after every sequence of {corpus.domain}")
    length = max(map(len, rows))
    return replace(corpus, ids=_block(rows, length), regions=_block(regions, length))


def _of_text(ids: list[int], rules: TokenRules) -> list[int]:
    return [MARKERS if token in rules.special else TEXT for token in ids]


def _block(rows: list[list[int]], length: int) -> np.ndarray:
    return np.array([[*row, *[PADDING] * (length - len(row))] for row in rows], dtype=np.int64)
