"""What a scan reads: sequences the model can take, whatever kind of input they come from."""

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
        rules: what tokenizer and model say of the ids.
        corpora: one a domain; tokens: what the model takes of each, in the same order.
        tokenizer: names the ids, or what stands in their place; None where ids are their own names.
        kind: what read them.
        decoder_input: what a decoder reads beside the sequences, where it is not what it would read by itself.
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
