"""`sinkscope arms`: measures what a model loses under interventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from sinkscope.cli.arms_job import ArmsLoss, Model, RunFolder, Written, prepared
from sinkscope.cli.dry_run import DryRun
from sinkscope.cli.options import with_options
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.grammar import told

EXAMPLE = "Example: sinkscope arms example:gemma-3-270m keys:first1 window:256+4"


def with_grammar(command: Callable[..., None]) -> Callable[..., None]:
    """Puts the grammar of arms, and an example of it, behind what the command says of itself."""
    command.__doc__ = f"{command.__doc__}\n\n{told()}\n\n{EXAMPLE}"
    return command


@with_grammar
@with_options
def arms(
    model: Model,
    named: Annotated[list[str] | None, typer.Argument(metavar="ARM", help="KIND:REST, see above.")] = None,
    arm: Annotated[list[str] | None, typer.Option(metavar="ARM", help="The same; may be repeated.")] = None,
    run: RunFolder = None,
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
