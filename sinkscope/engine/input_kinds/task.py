"""Sequences drawn from the task that a model of real vectors brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.probes import DRY_RUN_TOKENS
from sinkscope.engine.input_kinds.kind import Asked, InputKind
from sinkscope.engine.reading import Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import TokenData
from sinkscope.inputs.vectors import TASKS, task_rules
from sinkscope.runs.values import Domain

if TYPE_CHECKING:
    import pandas as pd


class TaskInput(InputKind):
    """Reads vectors drawn from the model's own task."""

    name: ClassVar[str] = "the model's own task"

    def __init__(self, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> None:
        super().__init__(asked, checkpoint, forward)
        assert checkpoint.task is not None  # else another kind claims the request
        self._task = checkpoint.task
        if asked.given is not None or asked.specs not in (None, (self._task.name,)):
            raise SinkscopeError(
                f"{checkpoint.name} reads real vectors drawn from its own task: leave --data out, or give --data "
                f"{self._task.name}"
            )
        if asked.first or asked.prepend or asked.bos != ("auto",):
            raise SinkscopeError(
                f"{checkpoint.name} reads real vectors, and no token: leave --bos, --first and --prepend out"
            )

    @classmethod
    def asked_for(cls, asked: Asked) -> bool:
        return asked.specs is not None and all(spec in TASKS for spec in asked.specs)

    @classmethod
    def claims(cls, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> bool:
        return checkpoint.task is not None

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._vectors(1), {}

    def several_probes(self) -> Tensor:
        """Returns sequences of the task, which differ everywhere but at BOS."""
        return self._vectors(DRY_RUN_TOKENS)

    def _vectors(self, count: int) -> Tensor:
        return torch.from_numpy(self._task.read(None, count, 0).vectors).to(self.checkpoint.device)

    def read(self, positions: int) -> Reading:
        asked = self.asked
        corpus = self._task.read(asked.seq_len, asked.num_sequences, asked.seed)
        tokens = TokenData(corpus.ids, vectors=corpus.vectors)
        return Reading(task_rules(self._task), [corpus], [tokens], self.checkpoint.tokenizer, self)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        return {"task": self._task.report(positions)}
