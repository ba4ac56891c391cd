"""The sequences that a scan reads, in one form for every kind of input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sinkscope.inputs import Corpus, TokenRules
from sinkscope.inputs.batches import TokenData, batches
from sinkscope.inputs.rules import first_token

if TYPE_CHECKING:
    from sinkscope.engine.input_kinds.kind import InputKind


@dataclass(frozen=True)
class Reading:
    """The sequences of a scan.

    Attributes:
        rules: special tokens, and which ids exist.
        corpora: one per domain. tokens: the model's input for each, in the same order.
        tokenizer: gives the ids their names; None where tables show the ids.
        kind: the input kind that read them.
        decoder_input: describes the decoder's input where it differs from `Forward.decoder_input`.
    """

    rules: TokenRules
    corpora: list[Corpus]
    tokens: list[TokenData]
    tokenizer: Any
    kind: InputKind
    decoder_input: str | None = None

    @property
    def total(self) -> int:
        """Sequences in all."""
        return sum(len(data.ids) for data in self.tokens)

    @property
    def measures(self) -> tuple[str, ...]:
        """The measurements that these sequences ask for by themselves."""
        return ("regions",) if any(corpus.regions is not None for corpus in self.corpora) else ()

    @property
    def warnings(self) -> list[str]:
        return [warning for corpus in self.corpora for warning in corpus.warnings]

    def first_token(self, domains: int | None = None) -> dict[str, Any]:
        """Id, text and kind of the first token over the first `domains` corpora."""
        return first_token([corpus.ids for corpus in self.corpora[:domains]], self.rules, self.tokenizer)

    def first_sequence(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The valid tokens of the first sequence, [1, length], and the model's other inputs for it."""
        batch = next(batches(self.tokens[0], 0, 1, device))
        inputs = batch.inputs if batch.spans is None else batch.inputs[:, slice(*batch.spans[0])]
        return inputs, batch.extra
