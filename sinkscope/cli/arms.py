"""`sinkscope arms`: measures what a model loses under interventions."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arms_job import ArmsLoss, Model, Written, prepared
from sinkscope.cli.common import DryRun
from sinkscope.cli.options import with_options
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.grammar import listed, told
from sinkscope.present.text import wrapped

EXAMPLE = "Example: sinkscope arms example:gemma-3-270m keys:first1 window:64+4"


def with_kinds(command: Callable[..., None]) -> Callable[..., None]:
    """Puts an arm of each kind, and an example, behind what the command says of itself."""
    arms = listed()
    width = max(len(name) for name, _ in arms) + 2
    lines = "\n".join(f"{name:{width}}{what}" for name, what in arms)
    command.__doc__ = f"{command.__doc__}\n\n\b\n{lines}\n\n{EXAMPLE}"
    return command


def print_kinds(wanted: bool) -> None:
    """Prints what every kind of arm does and how it is written, and ends."""
    if wanted:
        width = min(shutil.get_terminal_size().columns, 100)
        for paragraph in told().split("\n\n"):
            sys.stdout.writelines(f"{line}\n" for line in [*wrapped(paragraph, width, rest="  "), ""])
        raise typer.Exit


@with_kinds
@with_options
def arms(
    model: Model,
    named: Annotated[
        list[str] | None, typer.Argument(metavar="ARM", help="An intervention; --kinds says how each is written.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(metavar="ARM", help="An intervention, as ARM is; may be repeated.")
    ] = None,
    kinds: Annotated[
        bool,
        typer.Option(
            "--kinds", help="Say how each kind is written and what it does.", callback=print_kinds, is_eager=True
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run folder of this model. Its T is the default, its documents are left out, and some interventions "
            "need its scores.",
        ),
    ] = None,
    *,
    text: ArmsLoss,
    written: Written,
    dry: DryRun,
) -> None:
    """Measure what a model loses under interventions (arms), each beside its random control."""
    chosen = list(dict.fromkeys([*(named or []), *(arm or [])]))
    if not chosen:
        raise SinkscopeError("nothing to measure: name at least one arm, e.g. sinkscope arms MODEL keys:first1")
    job = prepared("arms", model, text, written, dry=dry)
    from sinkscope.present.figures.arms import draw_arms
    from sinkscope.present.terminal.arms import render_arms

    job.measure_arms(draw_arms, render_arms, arms=chosen, run=run)
