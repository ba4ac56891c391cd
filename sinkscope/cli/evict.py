"""`sinkscope evict`: what a cache may forget, as a grid of windows and sinks."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from sinkscope.cli.arms_job import GridLoss, Model, RunFolder, Written, numbers, prepared
from sinkscope.cli.common import DryRun
from sinkscope.cli.options import with_options
from sinkscope.errors import SinkscopeError

LAYERS = {"full": "/full", "all": ""}


@with_options
def evict(
    model: Model,
    run: RunFolder = None,
    window: Annotated[
        str, typer.Option(metavar="W,W,...", help="Window sizes: how many of the last keys a query sees, at least 1.")
    ] = "64",
    sinks: Annotated[str, typer.Option(metavar="S,S,...", help="How many of the first keys stay visible.")] = "0,1,4",
    layers: Annotated[
        str,
        typer.Option(
            metavar="full|all", help="Layers whose cache is limited: full (those without a sliding window) or all."
        ),
    ] = "full",
    *,
    text: GridLoss,
    written: Written,
    dry: DryRun,
) -> None:
    """Measure how much a model's loss rises if its cache keeps only a window and a few first tokens (StreamingLLM).

    The control keeps equally many random tokens. Attention masks take the place of a cache, so that one pass measures
    every position.

    Example: sinkscope evict example:gemma-3-270m --window 64,256 --sinks 0,1,4 --seq-len 1024
    """
    if layers not in LAYERS:
        raise SinkscopeError(f"--layers {layers!r}: choose one of {', '.join(LAYERS)}")
    grid = [
        f"window:{size}+{count}{LAYERS[layers]}"
        for size in numbers(window, "window", 1, "64,256")
        for count in numbers(sinks, "sinks")
    ]
    job = prepared("evict", model, text, written, dry=dry)
    from sinkscope.present.figures.arms import draw_grid
    from sinkscope.present.terminal.arms import render_grid

    draw = partial(draw_grid, kept="first tokens kept")
    job.measure_arms(draw, lambda result, files: render_grid(result, "sinks", files), arms=grid, run=run)
