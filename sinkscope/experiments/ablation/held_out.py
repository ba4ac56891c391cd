"""Text for the loss: documents that the run, whose scores choose the heads, has not read."""

from __future__ import annotations

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus, read_corpus, token_rules
from sinkscope.inputs.documents import check_spec
from sinkscope.runs.schema.manifest import Manifest


def held_out(
    spec: str, checkpoint: Checkpoint, manifest: Manifest, seq_len: int | None, count: int, seed: int
) -> Corpus:
    """`count` sequences (or as many as are left) of a SPEC, without the documents the run read from the same SPEC.

    `seq_len` None = the run's own. Raises SinkscopeError: no document left, the very sequences of the run, no
    tokenizer, data that cannot be read.
    """
    check_spec(spec)
    length = seq_len or max(data.seq_len for data in manifest.data)
    if length < 2 or count < 2:
        raise SinkscopeError("a loss with its error needs --seq-len and --num-sequences of at least 2")
    check_length(checkpoint, length)
    read = [data for data in manifest.data if data.spec == spec]
    if spec.partition("#")[0].lower().endswith(".txt") and any(data.seq_len != length for data in read):
        raise SinkscopeError(
            f"the run read {spec} in windows of {read[0].seq_len} tokens: give that --seq-len, or other --data"
        )
    names = {name for data in read for joined in data.documents for name in joined.split(" + ")}
    bos = manifest.request.bos[0]
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    try:
        corpus = read_corpus(spec, checkpoint.tokenizer, rules, length, count, bos, seed, without=names)
    except SinkscopeError as error:
        if names and ("left out" in str(error) or "too short" in str(error)):
            raise SinkscopeError(
                f"--data {spec}: the run has read it all, nothing is left to measure a loss on; give other --data, or "
                "scan with fewer --num-sequences"
            ) from None
        raise
    if corpus.fingerprint in {data.fingerprint for data in manifest.data}:
        raise SinkscopeError(f"--data {spec}: these are the very sequences the run read; give another --seed or --data")
    if len(corpus.ids) < 2:
        raise SinkscopeError(f"--data {spec}: one sequence is left; a loss with its error needs two")
    return corpus
