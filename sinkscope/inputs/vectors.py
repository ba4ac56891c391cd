"""Models that read real vectors, not token ids, bring the task those are drawn from: a source of inputs like a SPEC.

A model says so by a method `input_task()`. The engine asks the task for sequences and knows nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import TokenRules

TASKS = ("trigger",)
"""SPECs that name a task; only a model that brings it can read it."""


class VectorTask(Protocol):
    """What the engine asks of a task.

    Attributes:
        name: the SPEC that names it (`--data NAME`); it is the default where a model brings one.
        tokens: names of the kinds of position, by the ids in `Corpus.ids`; kind 0 is BOS.
    """

    name: str
    tokens: tuple[str, ...]

    def read(self, seq_len: int | None, num_sequences: int | None, seed: int) -> Corpus:
        """Sequences with `vectors`; None = the task's own length and number."""

    def report(self, positions: Any) -> dict[str, Any]:
        """What summary.json says of the task, from the run's positions table: `columns`, `heads` (rows), `in_words`."""


@dataclass(frozen=True)
class KindNames:
    """Stands in for a tokenizer where positions have kinds, not tokens."""

    names: tuple[str, ...]

    def convert_ids_to_tokens(self, kind: int) -> str:
        return self.names[kind]


def task_of(model: nn.Module) -> VectorTask | None:
    """The task a model brings; None for the models of the world, which read token ids."""
    bring = getattr(model, "input_task", None)
    return bring() if callable(bring) else None


def task_rules(task: VectorTask) -> TokenRules:
    return TokenRules([], [], 0, frozenset({0}), len(task.tokens), 0)
