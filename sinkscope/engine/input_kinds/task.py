"""Sequences drawn from the task that a model of real vectors brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import TokenData
from sinkscope.inputs.signals import TASKS, task_rules
from sinkscope.runs.request import Request
from sinkscope.tables.values import Domain

if TYPE_CHECKING:
    import pandas as pd


class TaskInput(InputKind):
    """Reads vectors drawn from the model's own task."""

    name: ClassVar[str] = "the model's own task"

    def __init__(self, request: Request, checkpoint: Checkpoint, forward: Forward) -> None:
        super().__init__(request, checkpoint, forward)
        assert checkpoint.task is not None  # else another kind claims the request
        self._task = checkpoint.task
        if request.handed is not None or request.data not in (None, (self._task.name,)):
            raise SinkscopeError(
                f"{checkpoint.name} reads real vectors drawn from its own task: leave --data out, or give --data "
                f"{self._task.name}"
            )
        if request.first or request.prepend or request.bos != ("auto",):
            raise SinkscopeError(
                f"{checkpoint.name} reads real vectors, not tokens: leave out --bos, --first and --prepend"
            )

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return request.data is not None and all(spec in TASKS for spec in request.data)

    @classmethod
    def claims(cls, request: Request, checkpoint: Checkpoint, forward: Forward) -> bool:
        return checkpoint.task is not None

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._vectors(1), {}

    def several_probes(self) -> Tensor:
        """Returns sequences of the task, which differ everywhere but at BOS."""
        return self._vectors(DRY_RUN_TOKENS)

    def _vectors(self, count: int) -> Tensor:
        return torch.from_numpy(self._task.read(None, count, 0).vectors).to(self.checkpoint.device)

    def read(self, positions: int) -> Reading:
        request = self.request
        corpus = self._task.read(request.seq_len, request.num_sequences, request.seed)
        tokens = TokenData(corpus.ids, vectors=corpus.vectors)
        return Reading(task_rules(self._task), [corpus], [tokens], self.checkpoint.tokenizer, self)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        return {"task": self._task.report(positions)}
