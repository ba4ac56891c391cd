"""`sinkscope trigger`: trains models of the trigger-conditional task, scans one, reproduces the paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import guarded, resumable, say
from sinkscope.cli.help import Command, Group
from sinkscope.cli.trigger_study import TRAINED, evaluate, explicit, necessity, relaxed, study

app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)

Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, no summary.")]


@app.callback()
def trigger() -> None:
    """Train and measure models of the trigger-conditional task, with attention sinks and without.

    The task is Ran-Milo's (2603.11487), who claims that softmax attention needs a sink to solve it and ReLU does not.

    Example: sinkscope trigger train --attention softmax --out runs/trigger-softmax
    """


def train(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for config.json and model.safetensors.")
    ],
    attention: Annotated[
        str,
        typer.Option(
            help="Kind: softmax, relu, sigmoid, softmax1, learned-sink, gated; relu-norm and sigmoid-norm, normalised; "
            "exp-free and sigmoid-free, divided by i; or an attention score that a package declares."
        ),
    ] = "softmax",
    layers: Annotated[int, typer.Option(help="Attention layers; two or more add to a residual stream.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads per layer, each of full width.")] = 1,
    dim: Annotated[int, typer.Option(help="Width d of a token, at least 4.")] = 16,
    length: Annotated[int, typer.Option(help="Positions L, at least 4.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed that draws the weights and the batches.")] = 0,
    steps: Annotated[
        int,
        typer.Option(help="Limit of training steps; training ends earlier once the task is solved."),
    ] = 50_000,
    default: Annotated[
        str, typer.Option(help="Target in rows without a trigger: zero, constant (y_i = c) or self (y_i = G x_i).")
    ] = "zero",
    target: Annotated[
        str,
        typer.Option(
            help="Target in the trigger's row: mean (of x_1 .. x_j), own (x_j) or mark (the trigger's unit vector)."
        ),
    ] = "mean",
    tolerance: Annotated[float, typer.Option(help="Largest absolute error of a solved task.")] = 0.005,
    optimizer: Annotated[str, typer.Option(help="adam, adamw, sgd (momentum 0.9) or muon.")] = "adam",
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate. [default: 1e-3 with one layer, 1e-4 with several]")
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay: decoupled in adamw and muon, part of the gradient in adam and sgd.")
    ] = 0.0,
    init: Annotated[float, typer.Option(help="Standard deviation of the weights at the start.")] = 0.02,
    checkpoints: Annotated[
        int | None,
        typer.Option(
            help="Keep N checkpoints in folders such as step-000100 of --out. They are spread up to --steps, denser "
            "early. If training ends before, later ones are left out; the start and the end are always kept. Also "
            "writes trajectory.csv and its figure.",
            metavar="N",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted training in --out.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model of the task and write it as an ordinary transformers folder, ready for `sinkscope scan`.

    The task is solved when the largest absolute error is below 0.005 both in a batch of 128 (the paper's criterion)
    and on 1000 evaluation sequences that are not trained on.

    Example: sinkscope trigger train --attention relu --layers 2 --heads 2 --out runs/trigger-relu-2x2
    """
    from sinkscope.present.terminal.progress import training_bar
    from sinkscope.trigger.screen import render_training
    from sinkscope.trigger.training import STATE, Recipe
    from sinkscope.trigger.training import train as run
    from sinkscope.trigger.trajectory import keeper

    recipe = Recipe(
        attention, layers, heads, dim, length, seed, steps, default, target, tolerance, optimizer, learning_rate,
        weight_decay, init,
    )  # fmt: skip
    recipe.config()
    keep = None if checkpoints is None else keeper(out, checkpoints, steps)
    with resumable(out, STATE, "the training is"), training_bar(quiet) as (begin, progress):
        begin(recipe.name, steps)
        model = run(recipe, out, resume=resume, progress=progress, keep=keep)
    text = render_training(model.config.training, out)
    if keep is not None:
        text += _write_trajectory(out, recipe.name)
    if not quiet:
        sys.stdout.write(text)


def _write_trajectory(out: Path, name: str) -> str:
    """Writes trajectory.csv and, where matplotlib is installed, its figure; says at which step each sink appears."""
    from sinkscope.present.figures.canvas import available
    from sinkscope.runs.folder import write_files
    from sinkscope.trigger.figure import trajectory as draw
    from sinkscope.trigger.trajectory import emergence, trajectory

    table = trajectory(out)
    files: dict[Path, str | bytes] = {
        out / "trajectory.csv": table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    }
    if available():
        files[out / "trajectory.png"] = draw(table, name)
    write_files(files)
    if not available():
        say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
    return f"{emergence(table)}\n"


def scan(
    model: Annotated[
        str, typer.Argument(help="Folder of a trigger model, or example:trigger-softmax.", metavar="MODEL")
    ],
    num_sequences: Annotated[
        int,
        typer.Option(
            help="Evaluation sequences, each with the trigger at position 7, or at the last one of shorter sequences."
        ),
    ] = 1000,
    length: Annotated[
        int | None, typer.Option(help="Positions of a sequence, at least 4. [default: the model's]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that draws the sequences.")] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with all digits.")] = False,
) -> None:
    """Print each head's BOS mass, once for the non-trigger rows and once for the trigger's row.

    `sinkscope scan` on the same model writes all tables.

    Example: sinkscope trigger scan example:trigger-relu
    """
    from sinkscope.checkpoints import open_checkpoint
    from sinkscope.engine.scan import scan as measure
    from sinkscope.present.terminal.run_parts import render_task, task_csv
    from sinkscope.present.terminal.table import terminal_style
    from sinkscope.trigger.as_input import need_task
    from sinkscope.trigger.task import check_sizes

    network = open_checkpoint(model).model
    config = need_task(network, model).config
    if length is not None:
        check_sizes(config.hidden_size, length)
    run = measure(network, num_sequences=num_sequences, seq_len=length, seed=seed)
    task = run.summary.task or {}
    sys.stdout.write(task_csv(task) if as_csv else render_task(task, terminal_style()["width"]))


def reproduce(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder for models, tables and figures; models already there are not trained again.",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Train only 1 x 1 and 2 x 2 models, with one seed; takes minutes.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number N of seeds: each model is trained with 0 .. N-1. [default: 3]")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(help="Number of layers, and of heads in each; may be repeated. [default: 1, 2, 4]"),
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="Kind of attention; may be repeated. [default: softmax, relu]")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train the paper's six models, compare them with its published numbers, and say whether its claim held.

    Example: sinkscope trigger reproduce --quick --out runs/trigger
    """
    from sinkscope.present.figures.canvas import available
    from sinkscope.present.terminal.progress import training_bar
    from sinkscope.present.terminal.table import terminal_style
    from sinkscope.trigger import reproduce as study
    from sinkscope.trigger.figure import draw_study
    from sinkscope.trigger.screen import render_study
    from sinkscope.trigger.training import Recipe

    plans = study.recipes(
        attention or study.ATTENTIONS,
        size or (study.QUICK_SIZES if quick else study.SIZES),
        seeds if seeds is not None else (study.QUICK_SEEDS if quick else study.SEEDS),
    )
    with resumable(out, *TRAINED), training_bar(quiet) as (begin, progress):

        def start(recipe: Recipe, number: int, total: int) -> None:
            begin(f"{recipe.name} ({number + 1} of {total})", recipe.steps)

        trained = study.reproduce(out, plans, start, progress, draw_study if available() else None)
    if not available():
        say("no figures: they need matplotlib (pip install 'sinkscope[figures]')")
    if not quiet:
        tables = study.model_table(trained), study.head_table(trained)
        sys.stdout.write(render_study(*tables, study.verdict(trained), out, terminal_style()["width"]))


app.command("train", cls=Command)(guarded(train))
app.command("scan", cls=Command)(guarded(scan))
app.command("reproduce", cls=Command)(guarded(reproduce))
app.command("evaluate", cls=Command)(guarded(evaluate))
app.command("explicit", cls=Command)(guarded(explicit))
app.command("necessity", cls=Command)(guarded(necessity))
app.command("relaxed", cls=Command)(guarded(relaxed))
app.command("study", cls=Command)(guarded(study))
