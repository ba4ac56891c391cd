"""What a scan reads: the SPECs, the token ids or the model's own task -> sequences the model can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus, TokenRules, check_spec, read_corpus, token_rules
from sinkscope.inputs.batches import TokenData, as_corpus, batches, token_data
from sinkscope.inputs.rules import first_token
from sinkscope.inputs.vectors import read_task, task_rules
from sinkscope.runs.defaults import NUM_SEQUENCES, SEQ_LEN
from sinkscope.runs.request import Request


@dataclass(frozen=True)
class Reading:
    """The sequences of a scan: one corpus a domain, with the tokens (or vectors) a model takes in the same order.

    `image_id`: the token that stands for a part of a picture, where text with pictures is read. `decoder_input`: what
    a decoder reads beside the sequences, where it is not what it would read by itself.
    """

    rules: TokenRules
    corpora: list[Corpus]
    tokens: list[TokenData]
    tokenizer: Any
    image_id: int | None = None
    decoder_input: str | None = None

    @property
    def total(self) -> int:
        """Sequences in all."""
        return sum(len(data.ids) for data in self.tokens)

    @property
    def warnings(self) -> list[str]:
        return [warning for corpus in self.corpora for warning in corpus.warnings]

    def first_token(self, domains: int | None = None) -> dict[str, Any]:
        """Id, text and kind of the first token over the first `domains` corpora."""
        return first_token([corpus.ids for corpus in self.corpora[:domains]], self.rules, self.tokenizer)

    def first_sequence(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The valid tokens of the first sequence, [1, length], and what else the model takes with them."""
        batch = next(batches(self.tokens[0], 0, 1, device))
        inputs = batch.inputs if batch.spans is None else batch.inputs[:, slice(*batch.spans[0])]
        return inputs, batch.extra


def read_inputs(request: Request, checkpoint: Checkpoint) -> Reading:
    """The sequences of every domain: the model's own task, text, or token ids as given.

    Raises SinkscopeError where they cannot be read, or are longer than the model's positions.
    """
    if checkpoint.task is not None:
        drawn = read_task(
            checkpoint.task, request.asked_data, checkpoint.name, request.seq_len, request.num_sequences, request.seed
        )
        tokens = TokenData(drawn.ids, vectors=drawn.vectors)
        return Reading(task_rules(checkpoint.task), [drawn], [tokens], checkpoint.tokenizer)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    for spec in request.specs:
        check_spec(spec)  # the name of a task is none of the data that other models read
    if request.specs:
        corpora = _read_text(request, checkpoint, rules)
        return Reading(rules, corpora, [TokenData(corpus.ids) for corpus in corpora], checkpoint.tokenizer)
    tokens = _read_ids(request, checkpoint)
    return Reading(rules, [as_corpus(tokens)], [tokens], checkpoint.tokenizer)


def _read_text(request: Request, checkpoint: Checkpoint, rules: TokenRules) -> list[Corpus]:
    """One corpus a SPEC and BOS mode, checked against the model's positions."""
    length, count = request.seq_len or SEQ_LEN, request.num_sequences or NUM_SEQUENCES
    check_length(checkpoint, length)
    if checkpoint.tokenizer_error and not all(_needs_no_tokenizer(spec) for spec in request.specs):
        raise SinkscopeError(
            f"{checkpoint.name} has no usable tokenizer ({checkpoint.tokenizer_error}): text cannot be read; "
            "give token ids (.jsonl with `input_ids`) or --data random"
        )
    corpora = []
    for spec in request.specs:
        for mode in request.bos_modes:
            corpus = read_corpus(spec, checkpoint.tokenizer, rules, length, count, mode, request.seed)
            name = spec if len(request.bos_modes) == 1 else f"{spec} bos={mode}"
            corpora.append(replace(corpus, domain=name))
    return corpora


def _read_ids(request: Request, checkpoint: Checkpoint) -> TokenData:
    """Token ids as given; cut where `seq_len` or `num_sequences` say so."""
    tokens = token_data(request.asked_data, checkpoint.vocabulary)
    rows, columns = slice(request.num_sequences), slice(request.seq_len)
    mask = None if tokens.mask is None else tokens.mask[rows, columns]
    tokens = TokenData(tokens.ids[rows, columns], mask)
    check_length(checkpoint, tokens.longest)
    return tokens


def _needs_no_tokenizer(spec: str) -> bool:
    return spec in ("random", "repeated") or spec.partition("#")[0].endswith((".jsonl", ".parquet"))
