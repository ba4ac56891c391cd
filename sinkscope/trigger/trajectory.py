"""Keeps checkpoints of a training, and follows the sink through them: at which step does it appear?

Checkpoints are folders `step-000100` inside the training's own, each a model that `scan` reads. The table is measured
from them after the training, on the same evaluation sequences at every step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError
from sinkscope.trigger.as_input import SINK
from sinkscope.trigger.evaluation import evaluate
from sinkscope.trigger.model import TriggerModel
from sinkscope.trigger.saving import saving
from sinkscope.trigger.training import Training, training_record

COLUMNS = (
    "step", "loss", "error", "layer", "head", "bos_mean", "bos_min", "bos_trigger", "share_mean", "self_mean",
    "total_mean", "pattern", "pattern_share",
)  # fmt: skip
"""Of trajectory.csv, one row per checkpoint and head. loss, error: mean squared and largest absolute error on 1000
evaluation sequences; the rest as in `evaluation`."""


def checkpoint_steps(number: int, steps: int) -> list[int]:
    """Returns `number` steps from 1 to `steps`, rising by one factor where that is at least one step: dense early.

    Raises SinkscopeError for fewer than 1, and for more than there are steps.
    """
    if not 1 <= number <= steps:
        raise SinkscopeError(f"checkpoints {number}: 1 to {steps} (the steps of the training) are possible")
    if number == 1:
        return [steps]
    chosen = [1]
    for left in range(number - 1, 0, -1):
        rest = steps - left + 1  # the largest step that leaves one for each that follows
        chosen.append(min(rest, max(chosen[-1] + 1, round(chosen[-1] * (steps / chosen[-1]) ** (1 / left)))))
    return chosen


def keeper(folder: Path, number: int, steps: int) -> Callable[[Training], None]:
    """Returns what a training calls before its first step and after each: it keeps the steps that are due.

    Kept are step 0, those of `checkpoint_steps`, and the last one of a training that ends earlier. A folder that is
    there is not written again: the same recipe has the same weights at the same step.
    """
    due = {0, *checkpoint_steps(number, steps)}

    def keep(training: Training) -> None:
        place = step_folder(folder, training.step)
        if (training.step in due or training.ended) and not place.exists():
            _save(training, place)

    return keep


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the model as it was after a step."""
    return folder / f"step-{step:06d}"


def _save(training: Training, place: Path) -> None:
    work = place.with_name(f".{place.name}.new")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed while it wrote
    config = training.model.config
    before, config.training = config.training, training_record(training)
    try:
        with saving(place.parent):
            training.model.save_pretrained(work)
            work.rename(place)
    finally:
        config.training = before


def trajectory(folder: Path) -> pd.DataFrame:
    """Evaluates every kept step, the earliest first, and returns the rows of trajectory.csv.

    Raises SinkscopeError where the folder holds none.
    """
    steps = {place.name.removeprefix("step-"): place for place in folder.glob("step-*")}
    places = [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)]
    if not places:
        raise SinkscopeError(f"{folder} holds no checkpoints: train anew with --checkpoints, into another --out")
    rows: list[dict[str, Any]] = []
    for place in places:
        with quiet_transformers():
            model = TriggerModel.from_pretrained(place).eval()
        record = model.config.training
        evaluation = evaluate(model, record["seed"])
        facts = {"step": record["steps"], "loss": evaluation.loss, "error": evaluation.error}
        rows += [
            {**facts, **head, **pattern.as_dict()}
            for head, pattern in zip(evaluation.heads, evaluation.patterns, strict=True)
        ]
    return pd.DataFrame(rows)[list(COLUMNS)]


def emergence(table: pd.DataFrame) -> str:
    """Says for each head between which two checkpoints its sink came: a mean BOS mass of 0.9 or more that stays."""
    lines = []
    for (layer, head), rows in table.groupby(["layer", "head"]):
        steps, sunk = rows["step"].to_numpy(), rows["bos_mean"].to_numpy() >= SINK
        name = f"layer {layer}, head {head}"
        if not sunk[-1]:
            lines.append(f"{name}: no sink at the end (BOS {rows['bos_mean'].iloc[-1]:.3f} at step {steps[-1]}).")
            continue
        first = len(sunk) - int(np.argmin(sunk[::-1])) if not sunk.all() else 0
        since = f"a sink at step {steps[first]}" + (f", none yet at step {steps[first - 1]}" if first else "")
        lines.append(f"{name}: {since}, and it stays.")
    return "\n".join(lines)
