"""A model that reads real vectors, not token ids, brings the task that draws them: a source of inputs like a SPEC.

Its method `input_task()` returns the task. The engine asks the task for sequences and knows nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import TokenRules

TASKS = ("trigger",)
"""SPECs that name a task; only a model that brings the task can read it."""


class VectorTask(Protocol):
    """What a task offers the engine.

    Attributes:
        name: the SPEC that names it (`--data NAME`), and the default data of its model.
        tokens: names of the kinds of position, by the ids in `Corpus.ids`; kind 0 is BOS.
    """

    name: str
    tokens: tuple[str, ...]

    def read(self, seq_len: int | None, num_sequences: int | None, seed: int) -> Corpus:
        """Draws sequences with `vectors`; None = the task's own length or number."""

    def report(self, positions: Any) -> dict[str, Any]:
        """Returns the task's entry of summary.json, from the run's positions table: `columns`, `heads`, `in_words`."""


@dataclass(frozen=True)
class KindNames:
    """Stands in for a tokenizer where positions have kinds, not tokens."""

    names: tuple[str, ...]

    def convert_ids_to_tokens(self, kind: int) -> str:
        return self.names[kind]


def task_of(model: nn.Module) -> VectorTask | None:
    """Returns the task that a model brings; None for ordinary models, which bring none."""
    bring = getattr(model, "input_task", None)
    return bring() if callable(bring) else None


def task_rules(task: VectorTask) -> TokenRules:
    return TokenRules([], [], 0, frozenset({0}), len(task.tokens), 0)
