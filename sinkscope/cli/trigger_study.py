"""`sinkscope trigger evaluate`, `explicit`, `necessity`, `study` and `relaxed`: the trigger task opened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkscope.cli.common import resumable, say
from sinkscope.errors import SinkscopeError

Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, no summary.")]
Model = Annotated[str, typer.Argument(help="Folder of a trigger model, or example:trigger-softmax.", metavar="MODEL")]
Seed = Annotated[int, typer.Option(help="Seed that draws the sequences.")]

TRAINED = ("models", "what is trained is", "the same command")
"""What an interrupted command keeps that trains several models, as `resumable` takes it."""


def evaluate(
    model: Model,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Positions L, at least 4; may be repeated. [default: 1, 2, 4 and 8 times the model's]"),
    ] = None,
    trigger: Annotated[
        list[int] | None,
        typer.Option(help="Position of the trigger; may be repeated. [default: 7, and the last]"),
    ] = None,
    num_sequences: Annotated[int, typer.Option(help="Evaluation sequences.")] = 1000,
    seed: Seed = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with all digits.")] = False,
) -> None:
    """Evaluate a model of the task at other lengths than that of its training: its error, and whether the sink stays.

    Example: sinkscope trigger evaluate example:trigger-softmax --length 16 --length 32 --length 128
    """
    from sinkscope.checkpoints import LoadOptions, open_checkpoint
    from sinkscope.trigger.as_input import need_task
    from sinkscope.trigger.evaluation import by_length
    from sinkscope.trigger.screen import render_lengths

    network: Any = open_checkpoint(model, LoadOptions(device="cpu")).model
    config = need_task(network, model).config
    table = by_length(
        network, length or [config.length * times for times in (1, 2, 4, 8)], trigger or (), seed, num_sequences
    )
    text = table.to_csv(index=False, lineterminator="\n") if as_csv else render_lengths(table, config.length)
    sys.stdout.write(text)


def explicit(
    out: Annotated[Path, typer.Argument(help="Folder for config.json and model.safetensors.", metavar="OUT")],
    attention: Annotated[str, typer.Option(help="Kind: relu or softmax.")] = "relu",
    heads: Annotated[int, typer.Option(help="Heads: 1, or 2 for the solutions that need two.")] = 1,
    default: Annotated[str, typer.Option(help="Target in rows without a trigger: zero or constant.")] = "zero",
    dim: Annotated[int, typer.Option(help="Width d of a token, at least 4.")] = 16,
    length: Annotated[int, typer.Option(help="Positions L up to which the softmax solution keeps --error.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed that draws the constant.")] = 0,
    error: Annotated[
        float | None,
        typer.Option(
            help="Largest absolute error of the softmax solution, on any input of at most --length positions; from "
            "0.00001 to below 1. [default: 0.001]"
        ),
    ] = None,
) -> None:
    """Write a solution of the task in closed form, without training, as a folder that `sinkscope scan` reads.

    One ReLU head solves it without a sink, one softmax head with one, two softmax heads without.

    Example: sinkscope trigger explicit runs/explicit-softmax --attention softmax --error 1e-4
    """
    from sinkscope.trigger.evaluation import evaluate as measure
    from sinkscope.trigger.explicit import ERROR, write_explicit
    from sinkscope.trigger.screen import render_explicit

    if error is not None and attention == "relu":
        raise SinkscopeError("--error goes with --attention softmax: the solutions with ReLU are exact")
    model = write_explicit(out, attention, heads, default, dim, length, seed, ERROR if error is None else error)
    sys.stdout.write(render_explicit(model.config.training, measure(model, seed).error, out))


def necessity(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder for models and the table. Models in it are not trained again."
        ),
    ],
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="What is changed: normalisation, tolerance, anchor, heads, target, optimizer, initialisation or "
            "weight-decay; may be repeated. [default: all]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number N of seeds: each model is trained with 0 .. N-1.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps after which a model counts as unsolved.")] = 6000,
    quiet: Quiet = False,
) -> None:
    """Change one thing of the paper's model at a time, train it, and say whether a sink was learned, and was needed.

    Prints a table in Markdown: what was changed, whether a solution without a sink is known, how many seeds solve the
    task, and BOS's raw attention and its share of the row where no trigger stands. necessity.csv holds a row per model.

    Example: sinkscope trigger necessity --group normalisation --seeds 1 --out runs/necessity
    """
    from sinkscope.present.terminal.progress import training_bar
    from sinkscope.trigger import necessity as experiment
    from sinkscope.trigger.screen import render_necessity
    from sinkscope.trigger.training import Recipe

    planned = experiment.plans(group or tuple(experiment.GROUPS), seeds, steps)
    with resumable(out, *TRAINED), training_bar(quiet) as (begin, progress):

        def start(recipe: Recipe, number: int, total: int) -> None:
            begin(f"{recipe.name} ({number + 1} of {total})", recipe.steps)

        table = experiment.necessity(out, planned, start, progress)
    if not quiet:
        sys.stdout.write(render_necessity(table))


def study(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder for models and tables. Models in it are not trained again."
        ),
    ],
    default: Annotated[
        list[str] | None,
        typer.Option(help="Target without a trigger; may be repeated. [default: zero, constant, self]"),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="Kind; may be repeated. [default: softmax, relu, sigmoid, softmax1, learned-sink, gated]"),
    ] = None,
    heads: Annotated[list[int] | None, typer.Option(help="Heads of the layer; may be repeated. [default: 1]")] = None,
    seeds: Annotated[int, typer.Option(help="Number N of seeds: each model is trained with 0 .. N-1.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps after which a model counts as unsolved.")] = 6000,
    quiet: Quiet = False,
) -> None:
    """Train a one-layer model for each default, attention and seed; say which pattern each learned: sink, diagonal, ...

    Prints a table in Markdown; study.csv holds one row per model, patterns.csv what each pattern could reach at best.

    Example: sinkscope trigger study --default constant --attention softmax --seeds 1 --out runs/study
    """
    from sinkscope.present.terminal.progress import training_bar
    from sinkscope.trigger import study as experiment
    from sinkscope.trigger.screen import render_summary
    from sinkscope.trigger.task import DEFAULTS
    from sinkscope.trigger.training import Recipe

    recipes = experiment.plans(
        default or tuple(DEFAULTS), attention or experiment.ATTENTIONS, heads or (1,), seeds, steps
    )
    with resumable(out, *TRAINED), training_bar(quiet) as (begin, progress):

        def start(recipe: Recipe, number: int, total: int) -> None:
            begin(f"{recipe.name} ({number + 1} of {total})", recipe.steps)

        table = experiment.study(out, recipes, start, progress)
    if not quiet:
        sys.stdout.write(render_summary(table))


# `sinkscope trigger relaxed`: what a block costs whose attention is a sink or a diagonal.


def relaxed(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for relaxed.csv and relaxed.png.")],
    groups: Annotated[
        list[int] | None, typer.Option(help="C, groups of dormant tokens; may be repeated. [default: 1, 2]")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="r_eta, dimensions of the nuisance; may be repeated. [default: 2, 4]")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(help="Width d of a token; may be repeated. [default: 64, 4096]")
    ] = None,
    kappa: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X", help="By how much the right score exceeds each wrong one; may be repeated. [default: 4]"
        ),
    ] = None,
    delta: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Size of the nuisance, |eta|^2 = delta^2 d; may be repeated. [default: 0.5]"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number N of random starts of each search.")] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, no summary.")] = False,
) -> None:
    """Find the cheapest block whose attention is a sink, and the cheapest whose attention is a diagonal.

    The relaxed switch of Lampert et al. (2605.08453), section 7: costs written down and found by search, beside the
    paper's bounds L and U. Prints a table in Markdown.

    Example: sinkscope trigger relaxed --groups 1 --rank 2 --out runs/relaxed
    """
    from sinkscope.present.figures.canvas import available
    from sinkscope.trigger.relaxed import study
    from sinkscope.trigger.relaxed.study import draw_relaxed, render_relaxed

    planned = study.tasks(groups or (1, 2), rank or (2, 4), width or (64, 4096), kappa or (4.0,), delta or (0.5,))

    def begin(name: str, number: int) -> None:
        if not quiet:
            say(f"{name} ({number + 1} of {len(planned)})")

    drawn = available()
    table = study.relaxed(out, planned, seeds, begin, draw_relaxed if drawn else None)
    if not drawn:
        say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
    if not quiet:
        sys.stdout.write(render_relaxed(table))
