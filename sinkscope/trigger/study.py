"""Default x attention x seeds: which pattern each kind of attention learns for each default, and whether it solves it.

The verdicts are those of `evaluation`. A model that did not solve the task within its steps gets one too: it says what
was learned, and is no evidence on what the task needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import write_file
from sinkscope.trigger import task
from sinkscope.trigger.evaluation import Evaluation, evaluate, join_patterns
from sinkscope.trigger.saving import making
from sinkscope.trigger.task import DEFAULTS
from sinkscope.trigger.theory import forced_patterns
from sinkscope.trigger.training import Progress, Recipe, train

ATTENTIONS = ("softmax", "relu", "sigmoid", "softmax1", "learned-sink", "gated")
"""What is trained where no attention is named. Kinds that differ in normalisation alone are compared in `necessity`."""

STEPS, SEEDS = 6000, 3
"""Steps after which a model counts as unsolved, and seeds: ours. One layer solves zero in about 1000 steps."""


@dataclass(frozen=True)
class Learned:
    """One trained model of the study."""

    recipe: Recipe
    steps: int
    solved: bool
    evaluation: Evaluation
    explained: float = float("nan")
    """1 - its mean squared error over that of the best constant output (the mean target of all rows)."""


def plans(
    defaults: Sequence[str] = tuple(DEFAULTS),
    attentions: Sequence[str] = ATTENTIONS,
    heads: Sequence[int] = (1,),
    seeds: int = SEEDS,
    steps: int = STEPS,
) -> list[Recipe]:
    """One recipe of one layer for each seed, number of heads, default and attention; all of seed 0 first.

    Raises SinkscopeError for a default, an attention, heads, seeds or steps that are not possible.
    """
    if seeds < 1:
        raise SinkscopeError(f"seeds {seeds}: at least 1 is needed")
    recipes = [
        Recipe(attention, 1, count, seed=seed, steps=steps, default=default)
        for seed in range(seeds)
        for count in heads
        for default in defaults
        for attention in attentions
    ]
    for recipe in recipes:
        recipe.config()
    return list(dict.fromkeys(recipes))


def study(
    out: Path,
    recipes: list[Recipe],
    begin: Callable[[Recipe, int, int], None] = lambda recipe, number, total: None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Trains and evaluates every recipe, and writes study.csv after each model and patterns.csv at the start.

    Models that `out`/models holds are not trained again, so that an interrupted study goes on. Returns study.csv's
    table. Raises SinkscopeError where `out` cannot be written, and where it holds a model of other steps.
    """
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    with making(out):
        _write(out / "patterns.csv", pd.DataFrame(forced_patterns()))
    rows: list[dict[str, Any]] = []
    for number, recipe in enumerate(recipes):
        begin(recipe, number, len(recipes))
        model = train(recipe, out / "models" / recipe.name, resume=True, progress=progress)
        record, evaluation = model.config.training, evaluate(model, seed=recipe.seed)
        explained = 1 - evaluation.loss / _simplest(recipe)
        rows.append(row_of(Learned(recipe, record["steps"], record["stopped"] == "criterion", evaluation, explained)))
        _write(out / "study.csv", pd.DataFrame(rows))
    return pd.DataFrame(rows)


def row_of(learned: Learned) -> dict[str, Any]:
    """One row of study.csv. Masses are means over heads; the verdicts of several heads are joined."""
    recipe, evaluation = learned.recipe, learned.evaluation

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "default": recipe.default, "attention": recipe.attention, "heads": recipe.heads, "seed": recipe.seed,
        "solved": learned.solved, "steps": learned.steps, "error": evaluation.error, "loss": evaluation.loss,
        "explained": learned.explained,
        "pattern": join_patterns([pattern.pattern for pattern in evaluation.patterns]),
        "pattern_share": join_patterns([pattern.pattern_share for pattern in evaluation.patterns]),
        "bos_mean": mean([head["bos_mean"] for head in evaluation.heads]),
        "self_mean": mean([head["self_mean"] for head in evaluation.heads]),
        "total_mean": mean([pattern.total_mean for pattern in evaluation.patterns]),
        "bos_share": mean([head["share_mean"] for head in evaluation.heads]),
        "self_share": mean([pattern.self_share_mean for pattern in evaluation.patterns]),
        "bos_trigger": mean([head["bos_trigger"] for head in evaluation.heads]),
    }  # fmt: skip


def _simplest(recipe: Recipe) -> float:
    """The mean squared error of the best constant output on the evaluation sequences of a recipe."""
    data = task.evaluation(task.EVALUATION_SEQUENCES, recipe.length, recipe.dim, recipe.seed)
    y = task.targets(data, residual=False, default=recipe.config().off, target=recipe.target).flatten(0, 1).double()
    return float((y - y.mean(0)).square().mean())


def _write(path: Path, table: pd.DataFrame) -> None:
    write_file(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
