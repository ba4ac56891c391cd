"""What does the sink hang on? The task is trained with one thing changed at a time, in groups, several seeds each.

The model has no positions, and a row reads the keys up to its own as a set. So rows after BOS must be as they were,
with BOS's mass on its new place: a check of the code. Rows up to BOS, its own among them, and all rows without one are
not trained for, and no one-head model that solves the task could write 0 in them: row 0 writes W x_0, and the trigger's
row asks for the data of x_0 elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.defaults import check_not_too_large
from sinkscope.runs.folder import write_file
from sinkscope.trigger import task
from sinkscope.trigger.as_input import SINK
from sinkscope.trigger.evaluation import evaluate
from sinkscope.trigger.model import TriggerModel
from sinkscope.trigger.study import Learned, row_of
from sinkscope.trigger.training import Progress, Recipe, train

PLACES = {
    "BOS at 3, rows after it: key 3": (3, slice(4, None), 3),
    "BOS at 3, rows up to it: key 0": (3, slice(0, 4), 0),
    "no BOS: key 0": (None, slice(0, None), 0),
}
"""By the words of a case: BOS's position, or None for an ordinary token in its place; the rows; the key whose mass is
asked."""


@dataclass(frozen=True)
class Moved:
    """Over the rows asked for but the trigger's and, for the masses, the key's own.

    Attributes:
        error: the largest absolute error, the trigger's row included where BOS stands before it.
        mass, share: mean A[i,key], and mean |A[i,key]| / sum_t |A[i,t]|, of all heads of the first layer.
        total: mean sum_t |A[i,t]|.
    """

    error: float
    mass: float
    share: float
    total: float


def moved(model: TriggerModel, place: str, seed: int = 0, count: int = task.EVALUATION_SEQUENCES) -> Moved:
    """Evaluates a model of one layer with BOS moved as PLACES says. Raises SinkscopeError for several layers."""
    config = model.config
    if config.residual:
        raise SinkscopeError(f"{config.num_hidden_layers} layers: BOS is moved in models of one layer")
    where, rows, key = PLACES[place]
    data = task.evaluation(count, config.length, config.hidden_size, seed)
    targets = task.targets(data, False, config.off, config.target)
    trigger = int(data.trigger[0])
    with torch.no_grad():
        outputs = model(inputs_embeds=_inputs(data.inputs, where, seed), output_attentions=True)
    errors = (outputs.last_hidden_state - targets).abs()
    others = [i for i in range(config.length)[rows] if i != trigger]
    judged = others + [trigger] * (where is not None and trigger in range(config.length)[rows])
    sizes = outputs.attentions[0][:, :, [i for i in others if i != key]].double().abs()
    total = sizes.sum(-1)
    share = torch.where(total > 0, sizes[..., key] / total, 0.0)
    return Moved(
        float(errors[:, judged].max()), float(sizes[..., key].mean()), float(share.mean()), float(total.mean())
    )


def _inputs(
    x: Float[Tensor, "batch token channel"], where: int | None, seed: int
) -> Float[Tensor, "batch token channel"]:
    """x with BOS and the token at `where` exchanged, or with an ordinary token in BOS's place."""
    x = x.clone()
    if where is None:
        ordinary = task.draw(len(x), x.shape[1], x.shape[2], torch.Generator().manual_seed(seed), trigger=2)
        x[:, 0] = ordinary.inputs[:, 1]
    else:
        x[:, [0, where]] = x[:, [where, 0]]
    return x


# What does the sink hang on? The task is trained with one thing changed at a time, in groups, several seeds each.
#
# A group answers one question. Its first case is the paper's model. `sinkless` says whether a solution without a sink
# is known, and why; the reasons are derived in `theory` or written down in `explicit`, and no training stands behind
# them.


STEPS, SEEDS = 6000, 3


@dataclass(frozen=True)
class Case:
    """A change of the paper's model. `sinkless`: whether a solution without a sink is known, and by what.

    With `place`, one of PLACES, nothing is trained anew: BOS is moved after the training.
    """

    name: str
    changes: dict[str, Any]
    sinkless: str
    place: str | None = None


FOLLOWED = next(iter(PLACES))
_ROWS_SUM = "no: one head whose rows sum to 1"
_EMPTY = "yes: all rows but the trigger's empty"
_PAPER = Case("as in the paper", {}, _ROWS_SUM)

GROUPS: dict[str, list[Case]] = {
    "normalisation": [
        Case("softmax: exp over its sum", {"attention": "softmax"}, _ROWS_SUM),
        Case("exp-free: exp over i", {"attention": "exp-free"}, "yes: rows as near to empty as asked"),
        Case("sigmoid-norm: sigmoid over its sum", {"attention": "sigmoid-norm"}, _ROWS_SUM),
        Case("sigmoid-free: sigmoid over i", {"attention": "sigmoid-free"}, "yes: rows as near to empty as asked"),
        Case("relu-norm: relu over its sum", {"attention": "relu-norm"}, f"{_EMPTY}, for 0 / 0 is 0"),
        Case("relu: relu over i", {"attention": "relu"}, _EMPTY),
    ],
    "tolerance": [
        _PAPER,
        Case("error below 0.05", {"tolerance": 0.05}, "no, but a smaller mass is enough"),
        Case("error below 0.5", {"tolerance": 0.5}, "yes: half of the mass is enough"),
    ],
    "anchor": [
        _PAPER,
        *(
            Case(place, {}, _ROWS_SUM if place == FOLLOWED else "no solution at all: row 0 sees itself alone", place)
            for place in PLACES
        ),
    ],
    "heads": [_PAPER, Case("two heads", {"heads": 2}, "yes: two heads that cancel")],
    "target": [
        _PAPER,
        Case("the trigger's own token", {"target": "own"}, _ROWS_SUM),
        Case("the trigger's mark", {"target": "mark"}, "yes: any row that leaves the trigger's key out"),
    ],
    "optimizer": [
        _PAPER,
        Case("SGD, rate 1", {"optimizer": "sgd", "learning_rate": 1.0}, _ROWS_SUM),
        Case("Muon, rate 0.01", {"optimizer": "muon", "learning_rate": 0.01}, _ROWS_SUM),
    ],
    "initialisation": [
        _PAPER,
        Case("standard deviation 0.1", {"init": 0.1}, _ROWS_SUM),
        Case("standard deviation 0.5", {"init": 0.5}, _ROWS_SUM),
    ],
    "weight-decay": [
        _PAPER,
        Case("AdamW, decay 0.01", {"optimizer": "adamw", "weight_decay": 0.01}, _ROWS_SUM),
        Case("AdamW, decay 1", {"optimizer": "adamw", "weight_decay": 1.0}, _ROWS_SUM),
    ],
}


@dataclass(frozen=True)
class Plan:
    """One training: its group, its case and its recipe."""

    group: str
    case: Case
    recipe: Recipe


def plans(groups: Sequence[str] = tuple(GROUPS), seeds: int = SEEDS, steps: int = STEPS) -> list[Plan]:
    """Every case of the groups with every seed, group by group. The recipe of a case that two groups share is one.

    Raises SinkscopeError for an unknown group, and for seeds or steps that are not possible.
    """
    for name in groups:
        if name not in GROUPS:
            raise SinkscopeError(
                f"unknown group {name!r}: choose one of {', '.join(GROUPS)}{did_you_mean(name, GROUPS)}"
            )
    if seeds < 1:
        raise SinkscopeError(f"seeds {seeds}: at least 1 is needed")
    check_not_too_large("seeds", seeds)
    planned = [
        Plan(group, case, replace(Recipe(seed=seed, steps=steps), **case.changes))
        for group in dict.fromkeys(groups)
        for case in GROUPS[group]
        for seed in range(seeds)
    ]
    for plan in planned:
        plan.recipe.config()
    return planned


def necessity(
    out: Path,
    planned: list[Plan],
    begin: Callable[[Recipe, int, int], None] = lambda recipe, number, total: None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Trains and evaluates every plan, and writes necessity.csv after each: group, case, sinkless, study.csv's columns.

    Models that `out`/models holds are not trained again. Raises SinkscopeError where `out` cannot be written, and where
    it holds a model of other steps.
    """
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    rows: list[dict[str, Any]] = []
    for number, plan in enumerate(planned):
        begin(plan.recipe, number, len(planned))
        model = train(plan.recipe, out / "models" / plan.recipe.name, resume=True, progress=progress)
        record, evaluation = model.config.training, evaluate(model, seed=plan.recipe.seed)
        learned = Learned(plan.recipe, record["steps"], record["stopped"] == "criterion", evaluation)
        told = {"group": plan.group, "case": plan.case.name, "sinkless": plan.case.sinkless}
        rows.append(told | row_of(learned) | {"sinks": evaluation.sinks} | _moved(model, plan))
        table = pd.DataFrame(rows)
        write_file(out / "necessity.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    return pd.DataFrame(rows)


def _moved(model: TriggerModel, plan: Plan) -> dict[str, Any]:
    """What a case that moves BOS replaces in a model's row; nothing for any other case."""
    if plan.case.place is None:
        return {}
    measured = moved(model, plan.case.place, plan.recipe.seed)
    kept = {
        "solved": measured.error < plan.recipe.tolerance, "error": measured.error, "bos_mean": measured.mass,
        "bos_share": measured.share, "total_mean": measured.total, "sinks": int(measured.mass >= SINK),
    }  # fmt: skip
    lost = ("loss", "explained", "pattern", "pattern_share", "self_mean", "self_share", "bos_trigger")
    return kept | dict.fromkeys(lost)
