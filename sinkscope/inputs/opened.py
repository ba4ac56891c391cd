"""Reads the same stretches of text under several openings: each opening is a domain, its sequences are pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import Corpus, read_corpus, too_short, warn_of_count
from sinkscope.inputs.cutting import Stretch, stretches
from sinkscope.inputs.documents import SYNTHETIC, read_source
from sinkscope.inputs.openings import Opening, opening_tokens
from sinkscope.inputs.rules import TokenRules, check_ids


def read_opened(
    spec: str, tokenizer: Any, rules: TokenRules, seq_len: int, num_sequences: int, opened: Sequence[Opening],
    seed: int = 0,
) -> list[Corpus]:  # fmt: skip
    """Reads a SPEC once and puts each opening before its sequences: one Corpus for each, in the same order.

    Every sequence has `seq_len` tokens: the opening, then as much of the text as fits, then the tokenizer's own ending.
    Sequence n of every Corpus therefore begins its text at the same token of the same documents.

    Raises SinkscopeError as `read_corpus` and `opening_tokens` do, and for data that are token ids, whose beginning is
    given.
    """
    before = [opening_tokens(each, tokenizer, rules, num_sequences, seed) for each in opened]
    most, least = (choose(tokens.shape[1] for tokens in before) + len(rules.suffix) for choose in (max, min))
    if seq_len <= most:
        raise SinkscopeError(
            f"--seq-len {seq_len} leaves no room for text beside the {most} tokens that --first, --prepend and the "
            "tokenizer add"
        )
    taken = _taken(spec, tokenizer, rules, seq_len - least, num_sequences, seed)
    if not taken:
        raise too_short(spec, seq_len)
    several = len({each.first for each in opened}) > 1, len({each.prepend for each in opened}) > 1
    corpora = []
    for opening, tokens in zip(opened, before, strict=True):
        corpus = Corpus(
            domain=spec + opening.named(several),
            ids=_joined(tokens, taken, rules.suffix, seq_len),
            pieces=[stretch.names for stretch in taken],
            passages=[stretch.passages for stretch in taken],
            bos=opening.named((True, True)).strip(),
            source=spec,
        )
        check_ids(corpus.ids.ravel().tolist(), rules.vocabulary, f"{spec} under this tokenizer")
        warn_of_count(corpus, num_sequences)  # what stands first was asked for
        corpora.append(corpus)
    return corpora


def _taken(spec: str, tokenizer: Any, rules: TokenRules, length: int, wanted: int, seed: int) -> list[Stretch]:
    """The text of each sequence: stretches of documents, or drawn tokens."""
    if spec not in SYNTHETIC:
        source = read_source(spec)
        if any(document.text is None for document in source.documents):
            raise SinkscopeError(f"--first and --prepend change how text begins, but {spec} holds no text")
        return stretches(source, tokenizer, length, wanted, seed)
    made = read_corpus(spec, tokenizer, rules, length, wanted, "never", seed)
    rows = zip(made.ids.tolist(), made.pieces, made.passages, strict=True)
    return [Stretch(number, *row) for number, row in enumerate(rows)]


def _joined(before: np.ndarray, taken: list[Stretch], suffix: list[int], seq_len: int) -> np.ndarray:
    """[sequence, seq_len]: the opening, the text cut to what is left, the tokenizer's own ending."""
    left = seq_len - before.shape[1] - len(suffix)
    rows = [[*row, *stretch.ids[:left], *suffix] for row, stretch in zip(before.tolist(), taken, strict=False)]
    return np.array(rows, dtype=np.int64)
