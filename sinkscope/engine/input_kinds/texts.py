"""Texts handed over in Python."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.inputs.batches import token_data_of
from sinkscope.inputs.documents import Texts
from sinkscope.runs.defaults import NUM_SEQUENCES, SEQ_LEN
from sinkscope.runs.request import Request


class TextsInput(InputKind):
    """Reads texts as the documents of a file are read: cut to one length, short ones joined."""

    name: ClassVar[str] = "texts"

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return isinstance(request.handed, Texts)

    @classmethod
    def check(cls, request: Request) -> None:
        if request.generate is not None:
            raise SinkscopeError("generate= only continues the texts of a SPEC: give data=FILE.jsonl")

    def read(self, positions: int) -> Reading:
        request, checkpoint = self.request, self.checkpoint
        length, count = request.seq_len or SEQ_LEN, request.num_sequences or NUM_SEQUENCES
        check_length(checkpoint, length)
        if checkpoint.tokenizer_error:
            raise SinkscopeError(
                f"{checkpoint.name} has no usable tokenizer ({checkpoint.tokenizer_error}): texts cannot be read; give "
                "tokenizer=, or token ids"
            )
        rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
        corpora = [
            read_corpus(request.handed, checkpoint.tokenizer, rules, length, count, mode, request.seed)
            for mode in request.bos
        ]
        if len(corpora) > 1:
            corpora = [replace(corpus, domain=f"{corpus.domain} bos={corpus.bos}") for corpus in corpora]
        return Reading(rules, corpora, [token_data_of(corpus) for corpus in corpora], checkpoint.tokenizer, self)
