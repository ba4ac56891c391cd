"""Makes the tokens with which sequences of text begin, and reads the same text under several of these openings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import (
    Corpus,
    Stretch,
    read_corpus,
    stretches,
    too_short,
    warn_of_count,
    warn_of_spelled_bos,
)
from sinkscope.inputs.documents import SYNTHETIC, read_source
from sinkscope.inputs.rules import TokenRules, check_ids, encode, ordinary_tokens
from sinkscope.runs.openings import Opening, repeats

ESCAPES = {"\\n": "\n", "\\t": "\t"}
SHOWN = 6
"""Most tokens that an error spells."""


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
    times = repeats(first)
    if first == "auto":
        ids = rules.prefix
    elif times is not None:
        if rules.bos_id is None:
            raise SinkscopeError(f"--first {first}: the tokenizer has no BOS token; give none, random or a token")
        ids = [rules.bos_id] * times
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


def _none(rows: int) -> np.ndarray:
    return np.empty((rows, 0), dtype=np.int64)


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
    # Asked before any is drawn, which 10^9 tokens would need memory for.
    _check_room(seq_len, max(opening.prepend for opening in opened))
    before = [opening_tokens(opening, tokenizer, rules, num_sequences, seed) for opening in opened]
    most, least = (choose(tokens.shape[1] for tokens in before) + len(rules.suffix) for choose in (max, min))
    _check_room(seq_len, most)
    taken = _taken(spec, tokenizer, rules, seq_len - least, num_sequences, seed)
    if not taken:
        raise too_short(spec, seq_len)
    several = len({opening.first for opening in opened}) > 1, len({opening.prepend for opening in opened}) > 1
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
        warn_of_spelled_bos(corpus, taken, rules)
        corpora.append(corpus)
    return corpora


def _check_room(seq_len: int, added: int) -> None:
    if seq_len <= added:
        raise SinkscopeError(
            f"--seq-len {seq_len} leaves no room for text beside the {added} tokens that --first, --prepend and the "
            "tokenizer add"
        )


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
