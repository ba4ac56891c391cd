"""Trains the paper's six models again, compares them with its published numbers, and judges its claim.

The claim (Ran-Milo 2603.11487): a softmax model that solves the task has a sink at the first token; ReLU needs none.
A softmax model that solves the task while no head has a sink would refute it; several seeds are tried for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.defaults import check_not_too_large
from sinkscope.runs.folder import write_files
from sinkscope.trigger.as_input import SINK
from sinkscope.trigger.evaluation import Evaluation, evaluate
from sinkscope.trigger.theory import forced_curve
from sinkscope.trigger.training import Progress, Recipe, train

ATTENTIONS, SIZES, SEEDS = ("softmax", "relu"), (1, 2, 4), 3
"""The paper's kinds of attention, and its sizes: so many layers, with as many heads in each. The seeds are ours."""

QUICK_SIZES, QUICK_SEEDS = (1, 2), 1

PUBLISHED: dict[tuple[str, int], list[list[float]]] = {
    ("softmax", 1): [[1.0]],
    ("softmax", 2): [[0.922, 1.0], [0.930, 1.0]],
    ("softmax", 4): [
        [0.304, 0.983, 0.272, 0.132], [1.0, 0.184, 1.0, 1.0], [1.0, 1.0, 0.906, 0.154], [0.188, 0.998, 0.214, 0.137],
    ],
    **{("relu", size): [[0.0] * size] * size for size in SIZES},
}  # fmt: skip
"""Mean BOS mass over non-trigger rows, [layer][head], read off the paper's figures to about 0.004. The paper's seeds
are not ours, so only counts and extremes can be compared, not single heads."""


@dataclass(frozen=True)
class Trained:
    """One model of the study: how training ended, and its evaluation."""

    recipe: Recipe
    steps: int
    solved: bool
    batch_error: float
    evaluation: Evaluation


Draw = Callable[[list[Trained], pd.DataFrame], dict[str, bytes]]
"""Draws figures from the models trained so far and the table of forced_mass.csv; returns them by file name."""


def recipes(attentions: Sequence[str] = ATTENTIONS, sizes: Sequence[int] = SIZES, seeds: int = SEEDS) -> list[Recipe]:
    """One recipe for every size, seed and attention, smallest size first. The defaults hold the paper's six models.

    Raises SinkscopeError for an attention or size that does not exist, and for `seeds` < 1 or too large.
    """
    if seeds < 1:
        raise SinkscopeError(f"seeds {seeds}: at least 1 is needed")
    check_not_too_large("seeds", seeds)
    plans = [Recipe(kind, size, size, seed=seed) for size in sizes for seed in range(seeds) for kind in attentions]
    for recipe in plans:
        recipe.config()
    return list(dict.fromkeys(plans))


def reproduce(
    out: Path,
    plans: list[Recipe],
    begin: Callable[[Recipe, int, int], None] = lambda recipe, number, total: None,
    progress: Progress | None = None,
    draw: Draw | None = None,
) -> list[Trained]:
    """Trains and evaluates every recipe, and writes tables and figures. Models already in `out`/models are reused.

    Writes models.csv, heads.csv, forced_mass.csv, verdict.txt and the figures of `draw` after each model, so that an
    interrupt loses nothing. Raises SinkscopeError where `out` cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    study = []
    for number, recipe in enumerate(plans):
        begin(recipe, number, len(plans))
        model = train(recipe, out / "models" / recipe.name, resume=True, progress=progress)
        record = model.config.training
        study.append(
            Trained(
                recipe, record["steps"], record["stopped"] == "criterion", record["batch_error"],
                evaluate(model, seed=recipe.seed),
            )
        )  # fmt: skip
        write(out, study, draw)
    return study


def write(out: Path, study: list[Trained], draw: Draw | None = None) -> None:
    """Writes the tables, the verdict and the figures of the models trained so far: all of the files or none."""
    curve = pd.DataFrame(forced_curve())
    files: dict[Path, str | bytes] = {}
    for name, table in (("models", model_table(study)), ("heads", head_table(study)), ("forced_mass", curve)):
        files[out / f"{name}.csv"] = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    files[out / "verdict.txt"] = verdict(study) + "\n"
    for name, content in ({} if draw is None else draw(study, curve)).items():
        files[out / name] = content
    write_files(files)


def head_table(study: list[Trained]) -> pd.DataFrame:
    """heads.csv: one row per head: the columns of `Evaluation.heads`, then `published_bos_mean`."""
    rows = []
    for trained in study:
        recipe = trained.recipe
        published = PUBLISHED.get((recipe.attention, recipe.layers))
        for row in trained.evaluation.heads:
            value = published[row["layer"]][row["head"]] if published else float("nan")
            rows.append({"model": recipe.name, **row, "published_bos_mean": value})
    return pd.DataFrame(rows)


def model_table(study: list[Trained]) -> pd.DataFrame:
    """models.csv: one row per model; `sinks`: heads with a mean BOS mass of 0.9 or more over non-trigger rows."""
    rows = []
    for trained in study:
        recipe, evaluation = trained.recipe, trained.evaluation
        means = [row["bos_mean"] for row in evaluation.heads]
        published = PUBLISHED.get((recipe.attention, recipe.layers))
        flat = [value for layer in published or [] for value in layer]
        rows.append({
            "attention": recipe.attention, "layers": recipe.layers, "heads": recipe.heads, "seed": recipe.seed,
            "steps": trained.steps, "solved": trained.solved, "batch_error": trained.batch_error,
            "evaluation_error": evaluation.error, "sinks": evaluation.sinks,
            "bos_mean_min": min(means), "bos_mean_max": max(means),
            "bos_share_max": max(row["share_mean"] for row in evaluation.heads),
            "published_sinks": sum(value >= SINK for value in flat) if flat else float("nan"),
            "published_bos_mean_min": min(flat, default=float("nan")),
            "published_bos_mean_max": max(flat, default=float("nan")),
        })  # fmt: skip
    return pd.DataFrame(rows)


def verdict(study: list[Trained]) -> str:
    """Says in sentences whether the claim held for the trained models."""
    softmax, relu = ([t for t in study if t.recipe.attention == kind and t.solved] for kind in ATTENTIONS)
    unsolved = [t.recipe.name for t in study if not t.solved]
    bare = [t for t in softmax if not t.evaluation.sinks]
    lines = []
    if bare:
        names = ", ".join(f"{t.recipe.name} (largest {_largest(t):.3f})" for t in bare)
        lines.append(f"REFUTED for softmax: {names} solved the task while no head has a sink.")
    elif softmax:
        weakest = min(_largest(t) for t in softmax)
        lines.append(
            f"The claim held for softmax: every one of the {len(softmax)} models that solved the task has a sink, a "
            f"head with mean BOS mass >= {SINK:g} where no trigger stands (the largest head of the weakest model: "
            f"{weakest:.3f})."
        )
    sunk = [
        t.recipe.name for t in relu if t.evaluation.sinks or max(r["share_mean"] for r in t.evaluation.heads) >= SINK
    ]
    if sunk:
        lines.append(
            f"ReLU has a sink in {', '.join(sunk)}: that it never needs one is the claim, not that it has none."
        )
    elif relu:
        raw, share = max(map(_largest, relu)), max(r["share_mean"] for t in relu for r in t.evaluation.heads)
        lines.append(
            f"The claim held for ReLU: {len(relu)} models solved the task and none has a sink (largest mean BOS score "
            f"of any head {raw:.4f}, largest mean share of its row {share:.4f})."
        )
    lines += _others(study)
    if unsolved:
        lines.append(f"Not solved within their steps, so no evidence either way: {', '.join(unsolved)}.")
    return "\n".join(lines)


def _others(study: list[Trained]) -> list[str]:
    """For each kind of attention beyond the paper: how many of the models that solved the task have a sink."""
    lines = []
    for kind in dict.fromkeys(t.recipe.attention for t in study if t.recipe.attention not in ATTENTIONS):
        solved = [t for t in study if t.recipe.attention == kind and t.solved]
        if solved:
            lines.append(
                f"Beyond the paper, {kind}: {sum(t.evaluation.sinks > 0 for t in solved)} of {len(solved)} models that "
                f"solved the task have a sink (largest heads: {min(map(_largest, solved)):.3f} to "
                f"{max(map(_largest, solved)):.3f})."
            )
    return lines


def _largest(trained: Trained) -> float:
    return max(float(row["bos_mean"]) for row in trained.evaluation.heads)
