"""Text from SPECs, cut into sequences by the model's tokenizer, and SPECs that need no tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sinkscope.checkpoints.checkpoint import check_length, default_length
from sinkscope.checkpoints.forward import written
from sinkscope.checkpoints.tokenizers import tokenizer_needed
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.inputs import Corpus, TokenRules, check_spec, token_rules
from sinkscope.inputs.batches import token_data_of
from sinkscope.inputs.chats import continued, read_chats_or_text
from sinkscope.inputs.openings import read_opened
from sinkscope.inputs.signals import TASKS
from sinkscope.runs.defaults import DATA, NUM_SEQUENCES, SEQ_LEN
from sinkscope.runs.openings import openings
from sinkscope.runs.request import Request


class TextInput(InputKind):
    """Reads one corpus for each SPEC and each way to begin a sequence."""

    name: ClassVar[str] = "text"
    continues: ClassVar[bool] = True

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return request.handed is None

    @classmethod
    def check(cls, request: Request) -> None:
        for spec in request.data or ():
            if spec not in TASKS:
                check_spec(spec)

    def read(self, positions: int) -> Reading:
        tokenizer = self.checkpoint.tokenizer
        rules = token_rules(tokenizer, self.checkpoint.vocabulary)
        with tokenizer_needed(self.checkpoint):
            corpora = self._corpora(rules)
        if self.request.generate is not None:
            corpora = [continued(corpus, rules, self._written) for corpus in corpora]
        return Reading(rules, corpora, [token_data_of(corpus) for corpus in corpora], tokenizer, self)

    def _written(self, prompt: list[int]) -> list[int]:
        """What the model writes after a prompt. Raises SinkscopeError where both are longer than its positions."""
        count = self.request.generate or 0
        check_length(self.checkpoint, len(prompt), count)
        with memory_needed(f"the writing of {count} tokens after {len(prompt)}"):
            return written(self.checkpoint, prompt, count)

    def _corpora(self, rules: TokenRules) -> list[Corpus]:
        request, checkpoint = self.request, self.checkpoint
        specs = request.data or (DATA,)
        for spec in specs:
            check_spec(spec)  # refuses the name of a task, which other models cannot read
        length, count = request.seq_len or default_length(checkpoint, SEQ_LEN), request.num_sequences or NUM_SEQUENCES
        check_length(checkpoint, length)
        corpora = []
        if request.first or request.prepend:
            opened = openings(request.first, request.prepend)
            read = (checkpoint.tokenizer, rules, length, count, opened, request.seed)
            return [corpus for spec in specs for corpus in read_opened(spec, *read)]
        for spec in specs:
            for mode in request.bos:
                corpus = read_chats_or_text(
                    spec, checkpoint.tokenizer, rules, request.seq_len, length, checkpoint.max_positions, count, mode,
                    request.seed, request.generate is not None,
                )  # fmt: skip
                name = spec if len(request.bos) == 1 else f"{spec} bos={mode}"
                corpora.append(replace(corpus, domain=name))
        return corpora
