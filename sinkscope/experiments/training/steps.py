"""The checkpoints of one training in their order, and the tables that their runs make together."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.training.trajectory import emergence, trajectory_rows
from sinkscope.runs.run import Run


@dataclass(frozen=True)
class Step:
    """One checkpoint of a training: `number` of training steps, the MODEL to load, and its revision on the hub."""

    number: int
    model: str
    revision: str | None = None

    @property
    def folder(self) -> str:
        """Name of the step's run folder; names sort as the steps do."""
        return f"step-{self.number:08}"

    @property
    def shown(self) -> str:
        return self.model if self.revision is None else f"{self.model} at {self.revision}"


def steps_of(models: list[str], revisions: list[str]) -> list[Step]:
    """The steps of `sinkscope track MODEL... --revisions A,B`, in the order of training.

    A folder that transformers' Trainer wrote tells its step in trainer_state.json. Otherwise the step is the last
    number in the name: checkpoint-500, step143000. Raises SinkscopeError where a name has no number, where two have the
    same, and where revisions are given with several models.
    """
    if revisions and len(models) != 1:
        raise SinkscopeError("--revisions are those of one model: name one MODEL")
    if revisions:
        steps = [Step(_number(revision), models[0], revision) for revision in revisions]
    else:
        steps = [Step(_recorded(model) if Path(model).is_dir() else _number(model), model) for model in models]
    steps = sorted(dict.fromkeys(steps), key=lambda step: step.number)
    for one, other in itertools.pairwise(steps):
        if one.number == other.number:
            raise SinkscopeError(f"{one.shown} and {other.shown} are both step {one.number}: name one of them")
    if len(steps) < 2:
        raise SinkscopeError("a trajectory needs at least two checkpoints: name more folders, or --revisions A,B")
    return steps


def _recorded(folder: str) -> int:
    path = Path(folder)
    try:
        return int(json.loads((path / "trainer_state.json").read_text("utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _number(path.resolve().name)


def _number(name: str) -> int:
    found = re.findall(r"\d+", name)
    if not found:
        raise SinkscopeError(f"{name} names no training step: a name like step512 or checkpoint-512 is needed")
    return int(found[-1])


def tables(runs: dict[int, Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """trajectory.csv and emergence.csv of the runs, by step. Raises SinkscopeError where their thresholds differ."""
    thresholds = {run.manifest.request.epsilon for run in runs.values()}
    if len(thresholds) > 1:
        raise SinkscopeError(f"the steps were scanned with different --epsilon ({sorted(thresholds)}): scan them anew")
    trajectory = pd.concat([trajectory_rows(run, step) for step, run in sorted(runs.items())], ignore_index=True)
    return trajectory, emergence(trajectory, thresholds.pop())
