"""Text for the loss: documents that the run, whose scores choose the heads, has not read."""

from __future__ import annotations

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus, read_corpus, token_rules
from sinkscope.inputs.documents import check_spec
from sinkscope.inputs.passages import NothingLeft, Passage
from sinkscope.runs.schema.manifest import Manifest


def held_out(
    spec: str, checkpoint: Checkpoint, manifest: Manifest, seq_len: int | None, count: int, seed: int
) -> Corpus:
    """`count` sequences (or as many as are left) of a SPEC, without what the run has read from any SPEC.

    A document is known by its content, whatever its file is called. `seq_len` None = the run's own. Raises
    SinkscopeError: nothing is left, the very sequences of the run, no tokenizer, data that cannot be read.
    """
    check_spec(spec)
    length = seq_len or max(data.seq_len for data in manifest.data)
    if length < 2 or count < 2:
        raise SinkscopeError("a loss with its error needs --seq-len and --num-sequences of at least 2")
    check_length(checkpoint, length)
    bos = manifest.request.bos[0]
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    try:
        corpus = read_corpus(spec, checkpoint.tokenizer, rules, length, count, bos, seed, without=read_before(manifest))
    except NothingLeft:
        raise SinkscopeError(
            f"--data {spec}: the run has read it all, nothing is left to measure a loss on; give other --data, or scan "
            "with fewer --num-sequences"
        ) from None
    if corpus.fingerprint in {data.fingerprint for data in manifest.data}:
        raise SinkscopeError(f"--data {spec}: these are the very sequences the run read; give another --seed or --data")
    if len(corpus.ids) < 2:
        raise SinkscopeError(f"--data {spec}: one sequence is left; a loss with its error needs two")
    return corpus


def read_before(manifest: Manifest) -> list[Passage | str]:
    """All that a run has read, by content; by name where sinkscope 0.1 wrote the run, which kept names alone.

    0.1 joined the names of several documents by ` + `: such a name stands for itself and for its parts.
    """
    passages: list[Passage | str] = [
        passage for data in manifest.data for pieces in data.passages for passage in pieces
    ]
    old = [data.documents for data in manifest.data if not data.passages]
    return passages + [name for names in old for joined in names for name in (joined, *joined.split(" + "))]
