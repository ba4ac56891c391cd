"""Documents and a tokenizer -> sequences of exactly T token ids: cut, joined only where they must be, BOS as asked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import SYNTHETIC, Document, Source, read_source
from sinkscope.inputs.rules import TokenRules, encode

BOS_MODES = ("auto", "always", "never")
JOINT = "\n\n"
CHARACTERS_PER_TOKEN = 12
"""Text handed to the tokenizer at first, per token wanted; more where that gives too few."""


@dataclass(frozen=True)
class Corpus:
    """Sequences of equal length T from one SPEC.

    Attributes:
        domain: its name in the tables, the SPEC as given.
        ids: token ids, [sequence, T].
        documents: what each sequence was read from; several names joined by ` + `.
        fingerprint: SHA-256 of the token ids (little-endian int64, with the shape), then of the vectors (float32).
        joined: sequences made of more than one document, because T exceeds a document.
        dropped: documents too short to use.
        bos: how the first token was chosen.
        vectors: what the model reads instead of ids, [sequence, T, d]; `ids` are then kinds of position.
        source: the SPEC; `domain` tells it apart from the same SPEC read another way.
    """

    domain: str
    ids: np.ndarray
    documents: list[str]
    joined: int = 0
    dropped: int = 0
    bos: str = "as given"
    warnings: list[str] = field(default_factory=list)
    vectors: np.ndarray | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.domain)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.ids.shape).encode())
        digest.update(np.ascontiguousarray(self.ids, dtype="<i8").tobytes())
        if self.vectors is not None:
            digest.update(np.ascontiguousarray(self.vectors, dtype="<f4").tobytes())
        return digest.hexdigest()


def read_corpus(
    spec: str, tokenizer: Any, rules: TokenRules, seq_len: int, num_sequences: int, bos: str = "auto", seed: int = 0,
    without: Collection[str] = (),
) -> Corpus:  # fmt: skip
    """The sequences a SPEC gives: `num_sequences` of `seq_len` tokens, or fewer where the data hold fewer.

    Which documents are used is drawn with `seed` where there are more than needed; their order stays the source's.
    A document is cut to length; documents are joined (by a blank line) only where T exceeds them. A .txt file is one
    long text, read in consecutive windows. Rows of `input_ids` are taken as they are: cut when longer, dropped (and
    counted) when shorter. `bos`: auto = what the tokenizer does by itself, always = the BOS token first, never = no
    special tokens at all; `random` and `repeated` hold none unless `always`. `without`: names of documents (windows of
    a .txt) that are left out.

    Raises SinkscopeError: unknown or unreadable data, too little text, ids outside the vocabulary, no BOS token.
    """
    prefix, suffix = _special_tokens(rules, bos)
    if spec in SYNTHETIC:
        return _synthetic(spec, rules, seq_len, num_sequences, bos, seed)
    source = read_source(spec).leaving_out(without)
    if any(document.ids is not None for document in source.documents):
        return _as_given(source, rules, seq_len, num_sequences, seed)
    if tokenizer is None:
        raise SinkscopeError(
            f"data {spec!r} is text and the model has no tokenizer: give token ids (.jsonl, `input_ids`)"
        )
    body_length = seq_len - len(prefix) - len(suffix)
    if body_length < 1:
        raise SinkscopeError(f"--seq-len {seq_len} leaves no room beside {len(prefix) + len(suffix)} special tokens")
    pieces = _windows if source.running else _cut_or_joined
    taken = sorted(pieces(source, tokenizer, body_length, num_sequences, seed), key=lambda piece: piece[0])
    if not taken:
        raise SinkscopeError(
            f"data {spec!r} is too short: no sequence of {seq_len} tokens; give more text or a smaller --seq-len"
        )
    corpus = Corpus(
        domain=spec,
        ids=np.array([prefix + body + suffix for _, body, _ in taken], dtype=np.int64),
        documents=[" + ".join(names) for _, _, names in taken],
        joined=sum(len(names) > 1 for _, _, names in taken),
        bos=bos,
    )
    check_ids(corpus.ids.ravel().tolist(), rules.vocabulary, f"{spec} under this tokenizer")
    _warn(corpus, rules, num_sequences)
    return corpus


Piece = tuple[int, list[int], list[str]]
"""(order in the source, token ids, names of the documents they come from)."""


def _special_tokens(rules: TokenRules, bos: str) -> tuple[list[int], list[int]]:
    if bos not in BOS_MODES:
        raise SinkscopeError(f"--bos {bos!r}: one of {', '.join(BOS_MODES)}")
    if bos == "never":
        return [], []
    if bos == "auto" or (rules.bos_id is not None and rules.prefix[:1] == [rules.bos_id]):
        return rules.prefix, rules.suffix
    if rules.bos_id is None:
        raise SinkscopeError("--bos always: the tokenizer has no BOS token; use --bos auto or never")
    return [rules.bos_id, *rules.prefix], rules.suffix


def _drawn(source: Source, wanted: int, seed: int) -> list[int]:
    """The order in which documents are tried: the source's own, or a seeded draw where there are more than needed."""
    count = len(source.documents)
    return list(range(count)) if count <= wanted else np.random.default_rng(seed).permutation(count).tolist()


def _cut_or_joined(source: Source, tokenizer: Any, length: int, wanted: int, seed: int) -> Iterator[Piece]:
    order = iter(_drawn(source, wanted, seed))
    for made, index in enumerate(order):
        if made == wanted:
            return
        text, names = _text_of(source.documents[index]), [source.documents[index].name]
        body = _encode_start(tokenizer, text, length)
        while len(body) < length:
            following = next(order, None)
            if following is None:
                return
            text += JOINT + _text_of(source.documents[following])
            names.append(source.documents[following].name)
            body = _encode_start(tokenizer, text, length)
        yield index, body, names


def _windows(source: Source, tokenizer: Any, length: int, wanted: int, seed: int) -> Iterator[Piece]:
    document = source.documents[0]
    tokens = _encode_start(tokenizer, _text_of(document), length * (wanted + len(source.without)))
    there = [i for i in range(len(tokens) // length) if f"{document.name}[{i}]" not in source.without]
    for index in there[:wanted]:
        yield index, tokens[index * length : (index + 1) * length], [f"{document.name}[{index}]"]


def _text_of(document: Document) -> str:
    if document.text is None:
        raise SinkscopeError(f"{document.name}: text and token ids are mixed in one source; keep them apart")
    return document.text


def _encode_start(tokenizer: Any, text: str, length: int) -> list[int]:
    """The first `length` tokens of a text, without tokenizing all of a long one."""
    size = CHARACTERS_PER_TOKEN * length
    while size < len(text):
        ids = encode(tokenizer, text[:size], False)
        if len(ids) > length + 16:  # the cut changes the last few tokens only
            return ids[:length]
        size *= 4
    return encode(tokenizer, text, False)[:length]


def _as_given(source: Source, rules: TokenRules, seq_len: int, wanted: int, seed: int) -> Corpus:
    for document in source.documents:
        if document.ids is None:
            raise SinkscopeError(f"{document.name}: text and token ids are mixed in one source; keep them apart")
        check_ids(document.ids, rules.vocabulary, document.name)
    long_enough = [document for document in source.documents if len(document.ids or ()) >= seq_len]
    dropped = len(source.documents) - len(long_enough)
    if not long_enough:
        longest = max(len(document.ids or ()) for document in source.documents)
        raise SinkscopeError(
            f"data {source.spec!r} is too short: no sequence has {seq_len} token ids (the longest has {longest}); "
            "give a smaller --seq-len"
        )
    chosen = sorted(_drawn(Source(source.spec, long_enough), wanted, seed)[:wanted])
    corpus = Corpus(
        domain=source.spec,
        ids=np.array([(long_enough[i].ids or [])[:seq_len] for i in chosen], dtype=np.int64),
        documents=[long_enough[i].name for i in chosen],
        dropped=dropped,
    )
    _warn(corpus, rules, wanted)
    return corpus


def check_ids(ids: Sequence[int], vocabulary: int, name: str) -> None:
    """Raises SinkscopeError where an id has no row in the model's embedding."""
    if any(not 0 <= token < vocabulary for token in ids):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise SinkscopeError(f"{name}: token id {wrong} is outside the model's vocabulary 0..{vocabulary - 1}")


def _synthetic(spec: str, rules: TokenRules, seq_len: int, wanted: int, bos: str, seed: int) -> Corpus:
    """Gu et al. 2410.10781's controls. `random`: T ids drawn from the vocabulary; `repeated`: one drawn, T times."""
    generator = np.random.default_rng([seed, SYNTHETIC.index(spec)])
    ordinary = np.array([token for token in range(rules.drawable) if token not in rules.special], dtype=np.int64)
    count = seq_len if spec == "random" else 1
    ids = np.broadcast_to(generator.choice(ordinary, (wanted, count)), (wanted, seq_len)).copy()
    if bos == "always":
        if rules.bos_id is None:
            raise SinkscopeError("--bos always: the tokenizer has no BOS token; use --bos auto or never")
        ids[:, 0] = rules.bos_id
    names = [f"{spec}[{index}]" for index in range(wanted)]
    return Corpus(spec, ids, names, bos="always" if bos == "always" else "none")


def _warn(corpus: Corpus, rules: TokenRules, wanted: int) -> None:
    count = len(corpus.ids)
    if count < wanted:
        corpus.warnings.append(
            f"{corpus.domain}: {count} sequences where {wanted} were asked for: the data hold no more"
        )
    if corpus.dropped:
        corpus.warnings.append(f"{corpus.domain}: {corpus.dropped} sequences shorter than --seq-len dropped")
    if corpus.joined:
        corpus.warnings.append(f"{corpus.domain}: {corpus.joined} of {count} sequences join several documents")
    if rules.bos_id is None:
        return
    first = corpus.ids[:, 0] == rules.bos_id
    if not first.all():
        corpus.warnings.append(
            f"{corpus.domain}: in {int((~first).sum())} of {count} sequences the tokenizer's BOS is not first; "
            "bos_mass is the mass on whatever comes first"
        )
    elif corpus.ids.shape[1] > 1 and (corpus.ids[:, 1] == rules.bos_id).any():
        corpus.warnings.append(f"{corpus.domain}: BOS stands twice at the start of a sequence")
