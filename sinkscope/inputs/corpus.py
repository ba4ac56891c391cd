"""Cuts documents into sequences of exactly T token ids, with BOS as asked; joins documents shorter than T."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import SYNTHETIC, DataSource, Document, origin, read_source
from sinkscope.inputs.rules import NoTokenizer, TokenRules, check_ids, encode, ordinary_tokens
from sinkscope.runs.openings import BOS_MODES
from sinkscope.runs.passages import LeftOut, NothingLeft, Passage, overlap

if TYPE_CHECKING:
    from sinkscope.inputs.handed import Given


JOINT = "\n\n"
AS_GIVEN = "as given"
"""How the first token was chosen where rows of token ids are read."""
OWN_SAMPLES = "standard errors and tests take each for a sample of its own"
CHARACTERS_PER_TOKEN = 12
"""Characters first handed to the tokenizer for each token wanted; more where these give too few."""


@dataclass(frozen=True)
class Stretch:
    """The tokens of one sequence, without special ones.

    Attributes:
        order: its place in the source.
        ids: token ids.
        names, passages: of the documents that the ids come from.
    """

    order: int
    ids: list[int]
    names: tuple[str, ...]
    passages: tuple[Passage, ...]


def stretches(source: DataSource, tokenizer: Any, length: int, wanted: int, seed: int) -> list[Stretch]:
    """Returns at most `wanted` stretches of `length` tokens, in the order of the source.

    The passage of a document that is cut or joined is the whole document, so that no part of it counts as unread.
    Raises SinkscopeError where there is no tokenizer.
    """
    if tokenizer is None:
        raise NoTokenizer(
            f"data {source.spec!r} is text and the model has no tokenizer: give token ids (.jsonl, `input_ids`)"
        )
    if source.running:
        return list(_windows(source, tokenizer, length, wanted))
    return sorted(_cut_or_joined(source, tokenizer, length, wanted, seed), key=lambda stretch: stretch.order)


def drawn(count: int, wanted: int, seed: int) -> list[int]:
    """The order in which documents are tried: the source's own, or a seeded draw where there are more than needed."""
    return list(range(count)) if count <= wanted else np.random.default_rng(seed).permutation(count).tolist()


def _cut_or_joined(source: DataSource, tokenizer: Any, length: int, wanted: int, seed: int) -> Iterator[Stretch]:
    order = iter(drawn(len(source.documents), wanted, seed))
    for made, index in enumerate(order):
        if made == wanted:
            return
        documents = [source.documents[index]]
        text = _text_of(documents[0])
        ids = _encode_start(tokenizer, text, length)
        while len(ids) < length:
            following = next(order, None)
            if following is None:
                return
            documents.append(source.documents[following])
            text += JOINT + _text_of(documents[-1])
            ids = _encode_start(tokenizer, text, length)
        names, passages = (document.name for document in documents), (document.passage for document in documents)
        yield Stretch(index, ids, tuple(names), tuple(passages))


def _windows(source: DataSource, tokenizer: Any, length: int, wanted: int) -> Iterator[Stretch]:
    document, left_out = source.documents[0], source.left_out
    whole = document.passage.document
    reach = left_out.reach(whole)
    if reach is None:
        return
    windows = wanted + len(left_out.names) + -(-reach // length)
    ids = _encode_start(tokenizer, _text_of(document), length * windows)
    for index in range(len(ids) // length):
        start, stop = index * length, (index + 1) * length
        name, passage = f"{document.name}[{index}]", Passage(whole, start, stop)
        if wanted and not left_out.holds(name, passage):
            wanted -= 1
            yield Stretch(index, ids[start:stop], (name,), (passage,))


def _text_of(document: Document) -> str:
    assert document.text is not None  # a source that holds ids is not cut
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


# Cuts documents into sequences of exactly T token ids, with BOS as asked; joins documents shorter than T.


@dataclass(frozen=True)
class Corpus:
    """Sequences of equal length T from one SPEC.

    Attributes:
        domain: its name in the tables: the SPEC, with the BOS mode where the scan has several.
        ids: token ids, [sequence, T].
        pieces: names of the documents each sequence was read from, in order; several where T exceeds a document.
        passages: the passage read of each of those documents; empty where no documents are read (pictures, sound,
            vectors), but all that a watched pass was given counts as one.
        dropped: documents too short to use.
        bos: how the first token was chosen.
        vectors: what the model reads instead of ids, [sequence, T, d]; `ids` are then kinds of position.
        source: the SPEC alone; the domain where it is not given.
        regions: place in `chats.REGIONS` of each token, [sequence, T], -1 past the end; None where the data are
            no conversations.
        beside: SHA-256 of what the model of a watched pass read of each sequence; empty where the ids tell it.
    """

    domain: str
    ids: np.ndarray
    pieces: Sequence[tuple[str, ...]]
    passages: Sequence[tuple[Passage, ...]] = ()
    dropped: int = 0
    bos: str = AS_GIVEN
    warnings: list[str] = field(default_factory=list)
    vectors: np.ndarray | None = None
    source: str = ""
    regions: np.ndarray | None = None
    beside: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.domain)

    @property
    def documents(self) -> list[str]:
        """The pieces of each sequence as the tables show them: names joined by ` + `, which a name may hold too."""
        return [" + ".join(names) for names in self.pieces]

    @property
    def joined(self) -> int:
        """Sequences made of more than one document."""
        return sum(len(names) > 1 for names in self.pieces)

    @property
    def windows(self) -> int:
        """Sequences that are windows of one long text."""
        return sum(any(passage.stop is not None for passage in read) for read in self.passages)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids (little-endian int64, with the shape), then of the vectors (float32), then of what
        was read beside them."""
        digest = hashlib.sha256(repr(self.ids.shape).encode())
        digest.update(np.ascontiguousarray(self.ids, dtype="<i8").tobytes())
        if self.vectors is not None:
            digest.update(np.ascontiguousarray(self.vectors, dtype="<f4").tobytes())
        for read in self.beside:
            digest.update(read.encode())
        return digest.hexdigest()


def read_corpus(
    spec: Given, tokenizer: Any, rules: TokenRules, seq_len: int, num_sequences: int, bos: str = "auto",
    seed: int = 0, without: Collection[Passage | str] = (),
) -> Corpus:  # fmt: skip
    """Reads `num_sequences` sequences of `seq_len` tokens from a SPEC, texts or token ids, or as many as these hold.

    Where there are more documents than needed, `seed` draws some; they keep the source's order. A document is cut to
    length; documents shorter than that are joined by a blank line. A .txt file is one long text, read in consecutive
    windows. Rows of `input_ids` are taken as they are: cut when longer, dropped (and counted) when shorter.
    `bos`: auto = what the tokenizer does by itself, always = the BOS token first, never = no special tokens at all;
    `random` and `repeated` hold none unless `always`. `without`: passages to leave out, whatever their document is
    called here; or names of documents of this SPEC (of windows of a .txt). A window's passage counts tokens, so it must
    come from the same tokenizer.

    Raises SinkscopeError: unknown or unreadable data, too little text, ids outside the vocabulary, no BOS token;
    NothingLeft where `without` leaves no sequence.
    """
    prefix, suffix = _special_tokens(rules, bos)
    left_out = LeftOut(without)
    if spec in SYNTHETIC:
        return _synthetic(spec, rules, seq_len, num_sequences, bos, seed, left_out)
    source = (read_source(spec) if isinstance(spec, str) else spec.source()).leaving_out(left_out)
    spec = source.spec
    if any(document.messages is not None for document in source.documents):
        raise SinkscopeError(f"data {spec!r} holds conversations, which only a scan reads: give text here")
    if any(document.ids is not None for document in source.documents):
        return _as_given(source, rules, seq_len, num_sequences, seed)
    body_length = seq_len - len(prefix) - len(suffix)
    if body_length < 1:
        raise SinkscopeError(f"--seq-len {seq_len} leaves no room beside {len(prefix) + len(suffix)} special tokens")
    taken = stretches(source, tokenizer, body_length, num_sequences, seed)
    if not taken:
        raise too_short(spec, seq_len, bool(left_out))
    corpus = Corpus(
        domain=spec,
        ids=np.array([prefix + stretch.ids + suffix for stretch in taken], dtype=np.int64),
        pieces=[stretch.names for stretch in taken],
        passages=[stretch.passages for stretch in taken],
        bos=bos,
    )
    check_ids(corpus.ids.ravel().tolist(), rules.vocabulary, f"{spec} under this tokenizer")
    warn(corpus, rules, num_sequences)
    warn_of_spelled_bos(corpus, taken, rules)
    return corpus


def too_short(spec: str, seq_len: int, left_out: bool = False) -> SinkscopeError:
    """The error of data that hold no sequence of that length."""
    words = f"data {spec!r} is too short: no sequence of {seq_len} tokens; give more text or a smaller --seq-len"
    return NothingLeft(words) if left_out else SinkscopeError(words)


def _special_tokens(rules: TokenRules, bos: str) -> tuple[list[int], list[int]]:
    if bos not in BOS_MODES:
        raise SinkscopeError(f"--bos {bos!r}: choose one of {', '.join(BOS_MODES)}")
    if bos == "never":
        return [], []
    if bos == "auto" or (rules.bos_id is not None and rules.prefix[:1] == [rules.bos_id]):
        return rules.prefix, rules.suffix
    if rules.bos_id is None:
        raise SinkscopeError("--bos always: the tokenizer has no BOS token; use --bos auto or never")
    return [rules.bos_id, *rules.prefix], rules.suffix


def _as_given(source: DataSource, rules: TokenRules, seq_len: int, wanted: int, seed: int) -> Corpus:
    for document in source.documents:
        if document.ids is None:
            raise SinkscopeError(f"{document.name}: text and token ids are mixed in one source; use a source for each")
        check_ids(document.ids, rules.vocabulary, document.name)
    long_enough = [document for document in source.documents if len(document.ids or ()) >= seq_len]
    dropped = len(source.documents) - len(long_enough)
    if not long_enough:
        longest = max(len(document.ids or ()) for document in source.documents)
        raise SinkscopeError(
            f"data {source.spec!r} is too short: no sequence has {seq_len} token ids (the longest has {longest}); "
            + ("give a smaller --seq-len" if longest >= 2 else "a row of at least 2 is needed")
        )
    chosen = [long_enough[i] for i in sorted(drawn(len(long_enough), wanted, seed)[:wanted])]
    corpus = Corpus(
        domain=source.spec,
        ids=np.array([(document.ids or [])[:seq_len] for document in chosen], dtype=np.int64),
        pieces=[(document.name,) for document in chosen],
        passages=[(document.passage,) for document in chosen],
        dropped=dropped,
    )
    warn(corpus, rules, wanted)
    return corpus


def _synthetic(
    spec: str, rules: TokenRules, seq_len: int, wanted: int, bos: str, seed: int, left_out: LeftOut
) -> Corpus:
    """Draws the controls of Gu et al. 2410.10781. `random`: T ids from the vocabulary; `repeated`: one id, T times.

    A passage covers the ids drawn: it does not depend on BOS nor, for `repeated`, on T.
    """
    documents = _drawn_documents(spec, rules, seq_len if spec == "random" else 1, wanted, seed, left_out)
    if not documents:
        raise NothingLeft(f"data {spec!r}: every sequence that the seed gives is left out; give another --seed")
    drawn_ids = np.array([document.ids for document in documents], dtype=np.int64)
    ids = np.broadcast_to(drawn_ids, (len(documents), seq_len)).copy()
    if bos == "always":
        assert rules.bos_id is not None  # else refused before anything is read
        check_ids([rules.bos_id], rules.vocabulary, "--bos always")
        ids[:, 0] = rules.bos_id
    return Corpus(
        domain=spec,
        ids=ids,
        pieces=[(document.name,) for document in documents],
        passages=[(document.passage,) for document in documents],
        bos="always" if bos == "always" else "none",
    )


def _drawn_documents(
    spec: str, rules: TokenRules, length: int, wanted: int, seed: int, left_out: LeftOut
) -> list[Document]:
    """Draws rows of ids with the seed; returns the first `wanted` not left out, or fewer where too few are drawn."""
    ordinary = ordinary_tokens(rules)
    for rounds in 1, 2, 4, 8, 16:
        generator = np.random.default_rng([seed, SYNTHETIC.index(spec)])
        rows = generator.choice(ordinary, (rounds * wanted + len(left_out), length)).tolist()
        documents = [Document(f"{spec}[{index}]", ids=row) for index, row in enumerate(rows)]
        fresh = [document for document in documents if not left_out.holds("", document.passage)]
        if len(fresh) >= wanted:
            break
    return fresh[:wanted]


def warn_of_count(corpus: Corpus, wanted: int) -> None:
    """Adds what a reader must know of the number of sequences and of what they are made of."""
    count = len(corpus.ids)
    if count < wanted:
        sequences = f"{count} sequence{'s' * (count != 1)}"
        corpus.warnings.append(f"{corpus.domain}: {sequences} where {wanted} were asked for: the data hold no more")
    if corpus.dropped:
        corpus.warnings.append(f"{corpus.domain}: {corpus.dropped} sequences shorter than --seq-len dropped")
    if corpus.joined:
        corpus.warnings.append(f"{corpus.domain}: {corpus.joined} of {count} sequences join several documents")
    if corpus.windows > 1:
        corpus.warnings.append(f"{corpus.domain}: all {count} sequences are windows of one text; {OWN_SAMPLES}")


def warn(corpus: Corpus, rules: TokenRules, wanted: int) -> None:
    """Adds the warnings that a reader of the corpus must know. `wanted`: number of sequences asked for."""
    warn_of_count(corpus, wanted)
    count = len(corpus.ids)
    copies = count - len(np.unique(corpus.ids, axis=0))
    if copies and corpus.domain not in SYNTHETIC:
        corpus.warnings.append(
            f"{corpus.domain}: {copies} of {count} sequences {'repeats' if copies == 1 else 'repeat'} another one; "
            f"{OWN_SAMPLES}"
        )
    if rules.bos_id is None:
        return
    first = corpus.ids[:, 0] == rules.bos_id
    if not first.all():
        corpus.warnings.append(
            f"{corpus.domain}: in {int((~first).sum())} of {count} sequences the tokenizer's BOS is not first; "
            f"bos_mass is then the attention on another token{_remedy(corpus, first)}"
        )
    elif corpus.ids.shape[1] > 1 and (corpus.ids[:, 1] == rules.bos_id).any():
        corpus.warnings.append(f"{corpus.domain}: BOS stands twice at the start of a sequence")


def warn_of_spelled_bos(corpus: Corpus, taken: Sequence[Stretch], rules: TokenRules) -> None:
    """Adds that a text itself spells the BOS, which the tokenizer makes the token of, beyond its first token."""
    spelled = sum(rules.bos_id in stretch.ids[1:] for stretch in taken)
    if spelled:
        corpus.warnings.append(
            f"{corpus.domain}: in {spelled} of {len(taken)} sequences the text itself spells the tokenizer's BOS, and "
            "the model reads a BOS there; attention to it is not in bos_mass"
        )


def _remedy(corpus: Corpus, first: np.ndarray) -> str:
    """What puts the BOS first, where the tokenizer left it out of every sequence of text."""
    return "; --bos always puts it first" if corpus.bos == "auto" and not first.any() else ""


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
