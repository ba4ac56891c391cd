"""Text for the loss: it excludes what was read by the run that an arm asks."""

from __future__ import annotations

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.asked import SEQUENCES, Text
from sinkscope.inputs import Corpus, read_corpus, token_rules
from sinkscope.inputs.handed import TokenRows
from sinkscope.runs.defaults import SEQ_LEN
from sinkscope.runs.passages import NothingLeft, Passage
from sinkscope.runs.schema.manifest import Manifest


def size_of(text: Text, manifest: Manifest | None) -> tuple[int, int]:
    """How many sequences are read, and tokens of each. Raises SinkscopeError for token ids of several lengths without
    `seq_len`."""
    given = text.data if isinstance(text.data, TokenRows) else None
    count = text.num_sequences or (SEQUENCES if given is None else len(given.rows))
    if text.seq_len or given is not None:
        return count, text.seq_len or (0 if given is None else given.length)
    return count, max((data.seq_len for data in ([] if manifest is None else manifest.data)), default=SEQ_LEN)


def held_out(text: Text, checkpoint: Checkpoint, manifest: Manifest | None) -> Corpus:
    """Reads as many sequences as are asked for, or as are left, without anything that the run has read.

    Documents are recognised by their content, whatever their file is called. Without a run (`manifest` None) nothing is
    left out. Raises SinkscopeError where fewer than 2 sequences are left, they are the run's own sequences, the data
    cannot be read, or there is no tokenizer.
    """
    spec = text.data if isinstance(text.data, str) else text.data.NAME
    read = [] if manifest is None else manifest.data
    count, length = size_of(text, manifest)
    check_length(checkpoint, length)
    without = [] if manifest is None else read_before(manifest)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    bos = _bos(manifest)
    try:
        corpus = read_corpus(text.data, checkpoint.tokenizer, rules, length, count, bos, text.seed, without=without)
    except NothingLeft:
        raise SinkscopeError(
            f"--data {spec}: the run has read it all, nothing is left to measure a loss on; give other --data, or scan "
            "with fewer --num-sequences"
        ) from None
    if corpus.fingerprint in {data.fingerprint for data in read}:
        raise SinkscopeError(f"--data {spec}: these are the very sequences the run read; give another --seed or --data")
    if len(corpus.ids) < 2:
        raise SinkscopeError(f"--data {spec}: one sequence is left; a loss with its error needs two")
    return corpus


def further(text: Text, checkpoint: Checkpoint, manifest: Manifest | None, corpus: Corpus, count: int) -> Corpus:
    """Reads `count` more sequences of the text that `corpus` was read from, as long as its own, or as many as are left,
    without anything that it holds.

    What the run has read is not left out. Raises SinkscopeError where nothing is left.
    """
    without = [passage for pieces in corpus.passages for passage in pieces]
    rules, length = token_rules(checkpoint.tokenizer, checkpoint.vocabulary), corpus.ids.shape[1]
    try:
        return read_corpus(
            text.data, checkpoint.tokenizer, rules, length, count, _bos(manifest), text.seed, without=without
        )
    except NothingLeft:
        raise SinkscopeError(
            f"--data {corpus.domain}: all of it is measured, and nothing is left to fit a map on; give other --data, "
            "or fewer --num-sequences"
        ) from None


def _bos(manifest: Manifest | None) -> str:
    """Whether BOS stands first, as the run asked for it."""
    return "auto" if manifest is None else manifest.request.bos[0]


def read_before(manifest: Manifest) -> list[Passage | str]:
    """Everything that a run has read: passages by content, or names of documents where sinkscope 0.1 wrote the run.

    0.1 recorded names only, and joined those of several documents with ` + `: both the whole name and its parts count.
    """
    passages: list[Passage | str] = [
        passage for data in manifest.data for pieces in data.passages for passage in pieces
    ]
    old = [data.documents for data in manifest.data if not data.passages]
    return passages + [name for names in old for joined in names for name in (joined, *joined.split(" + "))]
