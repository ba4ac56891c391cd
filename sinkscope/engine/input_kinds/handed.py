"""Texts or token ids handed over in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope.checkpoints.checkpoint import check_length, configuration, default_length
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.inputs.batches import as_corpus, token_data, token_data_of
from sinkscope.inputs.corpus import warn_of_count
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
        length, count = request.seq_len or default_length(checkpoint, SEQ_LEN), request.num_sequences or NUM_SEQUENCES
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


# Token ids handed over in Python.


class TokenIdInput(InputKind):
    """Reads token ids as given; `seq_len` keeps the first tokens of each sequence, wherever its padding stands."""

    name: ClassVar[str] = "token ids"

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return request.handed is not None

    @classmethod
    def check(cls, request: Request) -> None:
        mode = next((mode for mode in request.bos if mode != "auto"), None)
        if mode is not None:
            raise SinkscopeError(f"bos={mode!r}: token ids are read unchanged, with BOS where they have it")
        if _can_be_read_twice(request.handed):
            token_data(request.handed, None)

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A module that is no transformers model does not tell which ids exist: it gets the first of those given."""
        if configuration(self.checkpoint.model) is not None or not _can_be_read_twice(self.request.handed):
            return super().probe()
        tokens = token_data(self.request.handed, self._vocabulary)
        start, end = tokens.span(0)
        first = torch.from_numpy(tokens.ids[:1, start : min(end, start + DRY_RUN_TOKENS)])
        return first.to(self.checkpoint.device), {}

    @property
    def _vocabulary(self) -> int | None:
        """How many token ids exist; None where no embedding tells."""
        try:
            return self.checkpoint.vocabulary
        except SinkscopeError:
            return None

    def read(self, positions: int) -> Reading:
        request, checkpoint = self.request, self.checkpoint
        tokens = token_data(request.handed, checkpoint.vocabulary)
        whole = as_corpus(tokens)
        rows = slice(request.num_sequences)
        ids = whole.ids[rows, : request.seq_len]
        ids = ids[:, (ids >= 0).any(0)]
        corpus = replace(whole, ids=ids, pieces=whole.pieces[rows], passages=whole.passages[rows])
        warn_of_count(corpus, request.num_sequences or 0)
        cut = token_data_of(corpus)
        check_length(checkpoint, cut.longest)
        rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
        return Reading(rules, [corpus], [cut], checkpoint.tokenizer, self)


def _can_be_read_twice(given: Any) -> bool:
    rows = given if isinstance(given, list | tuple) else ()
    return not any(isinstance(value, Iterator) for value in (given, *rows))
