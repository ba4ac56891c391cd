"""`sinkscope quant`: what rounding costs, as a grid of bits and tokens kept in 16 bits."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from sinkscope.cli.arms_job import GridLoss, Model, RunFolder, Written, numbers, prepared
from sinkscope.cli.common import DryRun
from sinkscope.cli.options import with_options

MOST_BITS = 16
"""Bits from which on an arm rounds nothing: `changes.WHOLE`, which needs torch."""


@with_options
def quant(
    model: Model,
    run: RunFolder = None,
    bits: Annotated[str, typer.Option(metavar="B,B,...", help="Bits of keys and values, each 1 to 16.")] = "2,3,4,8",
    kept: Annotated[
        str, typer.Option(metavar="N,N,...", help="How many of the first tokens keep their keys and values unrounded.")
    ] = "0,1,4",
    acts: Annotated[
        str | None,
        typer.Option(
            metavar="B,B,...",
            help="Also round activations to these bits, each 2 to 16, with a scale per tensor and with a scale per "
            "token.",
        ),
    ] = None,
    *,
    text: GridLoss,
    written: Written,
    dry: DryRun,
) -> None:
    """Measure how much a model's loss rises if its KV cache, or its activations, are rounded to few bits.

    The first tokens may be left unrounded (--kept). The control leaves equally many random tokens unrounded.

    Example: sinkscope quant example:gemma-3-270m --bits 3,4 --kept 0,1,4 --acts 8
    """
    grid = [
        f"kv:{width}" + (f"+first{count}" if count else "")
        for width in numbers(bits, "bits", 1, "3,4", MOST_BITS)
        for count in numbers(kept, "kept")
    ]
    if acts is not None:
        widths = numbers(acts, "acts", 2, "4,8", MOST_BITS)
        grid += [f"acts:{width}/{step}" for width in widths for step in ("tensor", "token")]
    job = prepared("quant", model, text, written, dry=dry)
    from sinkscope.present.figures.arms import draw_grid
    from sinkscope.present.terminal.arms import render_grid

    draw = partial(draw_grid, kept="first tokens kept in 16 bits")
    job.measure_arms(draw, lambda result, files: render_grid(result, "kept", files), arms=grid, run=run)
