"""The checkpoints of one training in their order, and the tables that their runs make together."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.training.trajectory import emergence, trajectory_rows
from sinkscope.runs.defaults import MOST
from sinkscope.runs.run import Run
from sinkscope.runs.saved.trajectory import step_folder


@dataclass(frozen=True)
class Step:
    """One checkpoint of a training: `number` of training steps, the MODEL to load, and its revision on the hub."""

    number: int
    model: str
    revision: str | None = None

    @property
    def folder(self) -> str:
        """Name of the step's run folder."""
        return step_folder(self.number)

    @property
    def shown(self) -> str:
        """The checkpoint for people to read."""
        return self.model if self.revision is None else f"{self.model} at {self.revision}"

    @property
    def training(self) -> str:
        """What the checkpoints of one training share: the hub model of the revisions, or the folder they lie in."""
        return str(Path(self.model).resolve().parent) if self.revision is None else self.model


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
    """The step that the Trainer recorded in a folder, or that of its name. Raises SinkscopeError where it is none."""
    path = Path(folder)
    try:
        step = json.loads((path / "trainer_state.json").read_text("utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _number(path.resolve().name)
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise SinkscopeError(f"{path / 'trainer_state.json'}: global_step {step!r:.40} is no number of training steps")
    return _possible(str(step), f"{path / 'trainer_state.json'}: global_step {step!r:.40}")


def _number(name: str) -> int:
    found = re.findall(r"[0-9]+", name)
    if not found:
        raise SinkscopeError(f"{name} names no training step: a name like step512 or checkpoint-512 is needed")
    return _possible(found[-1], f"{name:.80}: {found[-1]:.40}")


def _possible(digits: str, shown: str) -> int:
    """Raises SinkscopeError, before anything is scanned, for a step that no table could hold."""
    if len(digits.lstrip("0")) > len(str(MOST["steps"])) or int(digits) > MOST["steps"]:
        raise SinkscopeError(f"{shown} is no number of training steps: at most {MOST['steps']:,} is possible")
    return int(digits)


def check_training(standing: Mapping[int, Run], steps: Sequence[Step]) -> None:
    """Raises SinkscopeError where a run that stands in the folder of a track is of another training than the steps."""
    trainings = {step.training for step in steps}
    for number, run in standing.items():
        asked = run.manifest.request
        before = Step(number, asked.model or run.manifest.model.id, asked.revision)
        if before.training not in trainings:
            raise SinkscopeError(
                f"{run.path} is a step of another training ({before.shown}): give another --out, or name a checkpoint "
                "from beside it too"
            )


def check_alike(runs: Mapping[int, Run]) -> None:
    """Raises SinkscopeError where two steps cannot stand in one table: of other heads, or scanned in another way."""
    thresholds = {run.manifest.request.epsilon for run in runs.values()}
    if len(thresholds) > 1:
        raise SinkscopeError(f"the steps were scanned with different --epsilon ({sorted(thresholds)}): scan them anew")
    (first, before), *others = sorted(runs.items())
    for number, run in others:
        own, theirs = (each.heads[["stream", "layer", "head"]].drop_duplicates() for each in (run, before))
        if set(own.itertuples(index=False)) != set(theirs.itertuples(index=False)):
            raise SinkscopeError(
                f"step {number} has {_counted(own)} and step {first} has {_counted(theirs, '')}: a trajectory is of "
                "one model; give another --out"
            )
        if _text_of(run) != _text_of(before):
            raise SinkscopeError(
                f"step {number} and step {first} were scanned over other text: scan all steps with the same options, "
                "or give another --out"
            )


def _counted(heads: pd.DataFrame, unit: str = " heads") -> str:
    layers = heads["layer"].nunique()
    return f"{len(heads)}{unit} in {layers}" + (f" layer{'s' * (layers != 1)}" if unit else "")


def _text_of(run: Run) -> dict[str, Any]:
    return {data.domain: data.fingerprint for data in run.manifest.data}


def tables(runs: Mapping[int, Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """trajectory.csv and emergence.csv of the runs, by step. Raises SinkscopeError as `check_alike` does."""
    check_alike(runs)
    epsilon = next(iter(runs.values())).manifest.request.epsilon
    trajectory = pd.concat([trajectory_rows(run, step) for step, run in sorted(runs.items())], ignore_index=True)
    return trajectory, emergence(trajectory, epsilon)
