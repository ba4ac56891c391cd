"""Sinks over training steps: the checkpoints of one training in their order, the rows of trajectory.csv, and when each
head's sink appeared (emergence.csv)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.defaults import MOST
from sinkscope.runs.per_sequence import domains, not_shares
from sinkscope.runs.run import Run
from sinkscope.runs.saved.trajectory import step_folder
from sinkscope.runs.schema.other_tables import TRAINING_TABLES
from sinkscope.runs.words import dormant_count

TRAJECTORY, EMERGENCE = (
    tuple(column.name for column in table_columns(TRAINING_TABLES[name])) for name in ("trajectory", "emergence")
)

OF_HEADS = ("sink_score", "bos_mass", "entropy")
OF_LAYERS = ("mean_bos_mass", "norm_ratio", "inf_norm")
JUMP = 0.8
"""A head's sink came in a jump where one interval between two measured steps holds this share of its rise."""


def trajectory_rows(run: Run, step: int) -> pd.DataFrame:
    """The rows of trajectory.csv for the run of one training step.

    Heads: sink_score, bos_mass and entropy. Layers: mean_bos_mass, norm_ratio and inf_norm. Model: sink_rate (percent,
    at the run's epsilon; empty where attention is no softmax), bos_mass, sink_score and entropy as summary.json holds
    them, dormant (number of heads).
    """
    only = domains(run)[0].domain
    parts = [_of_model(run, only)]
    for table, level, metrics in ((run.layers, "layer", OF_LAYERS), (run.heads, "head", OF_HEADS)):
        parts += [_of_table(table, only, level, metric) for metric in metrics]
    rows = pd.concat(parts, ignore_index=True).assign(step=step)
    return rows[list(TRAJECTORY)].astype({"layer": "Int64", "head": "Int64"})


def _of_model(run: Run, only: str) -> pd.DataFrame:
    epsilon, unjudged = f"{run.manifest.request.epsilon:g}", not_shares(run)
    answers = {name: answer.streams for name, answer in run.summary.domains.items()} or {only: run.summary.streams}
    rows: list[dict[str, Any]] = []
    for domain, streams in answers.items():
        for stream, summary in streams.items():
            place = {"domain": domain, "stream": stream, "level": "model", "layer": None, "head": None}
            count = dormant_count(summary.dormant, summary.heads)
            rate = None if stream in unjudged else summary.sink_rate_percent[epsilon].T
            rows.append(place | {"metric": "sink_rate", "value": np.nan if rate is None else rate, "sem": np.nan})
            rows.append(place | {"metric": "dormant", "value": np.nan if count is None else count, "sem": np.nan})
            for name in ("bos_mass", "sink_score", "entropy"):
                average = getattr(summary, name)
                rows.append(place | {"metric": name, "value": average.mean, "sem": average.sem})
    return pd.DataFrame(rows)


def _of_table(table: pd.DataFrame, only: str, level: str, metric: str) -> pd.DataFrame:
    """`only`: the domain of a run that has one, whose tables leave the column out."""
    return pd.DataFrame({
        "domain": table.get("domain", only), "stream": table["stream"], "level": level, "layer": table["layer"],
        "head": table["head"] if level == "head" else None, "metric": metric, "value": table[metric],
        "sem": table.get(f"{metric}_sem", np.nan),
    })  # fmt: skip


def emergence(trajectory: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """When each head's sink appeared: a row per (domain, stream, layer, head), from its sink_score at every step.

    first, last: sink_score at the first and at the last step. emerged: the first step from which on sink_score exceeds
    `epsilon` at every later step; empty where it does not at the last one. half_rise: the first step from which on
    sink_score stays at or above the middle between `first` and `last`. largest_gain: the share of the rise (last -
    first) that the steepest interval between two measured steps holds. shape: `start` where the sink was there at
    every step, `returned` where it was there, was lost and came back, `jump` where largest_gain is 0.8 or more, else
    `ramp`.
    half_rise and largest_gain are empty but for `jump` and `ramp`; all three are empty where a step has no score. All
    but `first` and `last` are empty for heads without a sink at the last step. The steps are those that were measured:
    what lies between is not seen. Ours.
    """
    scores = trajectory[(trajectory["level"] == "head") & (trajectory["metric"] == "sink_score")]
    keys = ["domain", "stream", "layer", "head"]
    rows = [
        dict(zip(keys, place, strict=True))
        | _emergence_of(curve["step"].to_numpy(), curve["value"].to_numpy(), epsilon)
        for place, curve in scores.sort_values("step").groupby(keys, sort=False)
    ]
    table = pd.DataFrame(rows, columns=list(EMERGENCE))
    return table.astype({"emerged": "Int64", "half_rise": "Int64"})


def _emergence_of(steps: np.ndarray, scores: np.ndarray, epsilon: float) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(EMERGENCE[4:]) | {"first": scores[0], "last": scores[-1]}
    emerged = _stays(scores > epsilon)
    if emerged is None:
        return row
    row["emerged"] = steps[emerged]
    if emerged == 0:
        return row | {"shape": "start"}
    if np.isnan(scores).any():
        return row
    if scores[0] > epsilon:
        return row | {"shape": "returned"}
    rise = scores[-1] - scores[0]
    half = _stays(scores >= scores[0] + rise / 2)
    gain = float(np.diff(scores).max() / rise)
    row |= {"half_rise": None if half is None else steps[half], "largest_gain": gain}
    return row | {"shape": "jump" if gain >= JUMP else "ramp"}


def _stays(holds: np.ndarray) -> int | None:
    """The first index from which on `holds` is true to the end; None where it is false at the end."""
    fails = np.flatnonzero(~holds)
    start = int(fails[-1]) + 1 if len(fails) else 0
    return start if start < len(holds) else None


# The checkpoints of one training in their order, and the tables that their runs make together.


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

    A folder that transformers' Trainer wrote tells its step in trainer_state.json. Otherwise the step is the number
    behind the word step in the name (step143000, stage1-step1000-tokens5B), or the last one: checkpoint-500. Raises
    SinkscopeError where a name has no number, where two have the same, and where revisions are given with several
    models.
    """
    if revisions and len(models) != 1:
        raise SinkscopeError("--revisions are those of one model: name one MODEL")
    if revisions:
        steps = [Step(_number(revision), models[0], revision) for revision in revisions]
    else:
        steps = [Step(_recorded(model) if Path(model).is_dir() else _number(model), model) for model in models]
    steps = sorted(dict.fromkeys(steps), key=lambda step: step.number)
    for first, second in itertools.pairwise(steps):
        if first.number == second.number:
            raise SinkscopeError(f"{first.shown} and {second.shown} are both step {first.number}: name one of them")
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
    named = re.findall(r"step[-_]?([0-9]+)", name.rpartition("/")[2], re.IGNORECASE)
    numbers = named or re.findall(r"[0-9]+", name)
    if not numbers:
        raise SinkscopeError(f"{name} names no training step: a name like step512 or checkpoint-512 is needed")
    return _possible(numbers[-1], f"{name:.80}: {numbers[-1]:.40}")


def _possible(digits: str, shown: str) -> int:
    """Raises SinkscopeError, before anything is scanned, for a step that no table could hold."""
    if len(digits.lstrip("0")) > len(str(MOST["steps"])) or int(digits) > MOST["steps"]:
        raise SinkscopeError(f"{shown} is no number of training steps: at most {MOST['steps']:,} is possible")
    return int(digits)


def check_training(standing: Mapping[int, Run], steps: Sequence[Step]) -> None:
    """Raises SinkscopeError where a run that stands in the folder of a track is of another training than the steps."""
    trainings = {step.training for step in steps}
    for number, run in standing.items():
        request = run.manifest.request
        before = Step(number, request.model or run.manifest.model.id, request.revision)
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
        heads, initial = (each.heads[["stream", "layer", "head"]].drop_duplicates() for each in (run, before))
        if set(heads.itertuples(index=False)) != set(initial.itertuples(index=False)):
            raise SinkscopeError(
                f"step {number} has {_counted(heads)} and step {first} has {_counted(initial, '')}: a trajectory is of "
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
    unjudged = {stream for run in runs.values() for stream in not_shares(run)}
    return trajectory, emergence(trajectory[~trajectory["stream"].isin(unjudged)], epsilon)
