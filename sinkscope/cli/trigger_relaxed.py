"""`sinkscope trigger relaxed`: what a block costs whose attention is a sink or a diagonal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import say


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
    from sinkscope.trigger.relaxed.screen import draw_relaxed, render_relaxed

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
