"""`sinkscope ablate`: zeroes the heads that a score calls dormant and measures what the model loses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arms_job import RESULTS, AblationLoss, Model, Written, prepared
from sinkscope.cli.libraries import import_libraries
from sinkscope.cli.options import with_options
from sinkscope.cli.scan_job import free_folder, unfinished_folder


@dataclass(frozen=True)
class AblationWritten(Written):
    """The same for an ablation, whose folder is a new one each time."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help=f"{RESULTS} [default: runs/MODEL-SLUG-ablation, with a number added if that exists]",
        ),
    ] = None


@with_options
def ablate(
    model: Model,
    run: Annotated[Path, typer.Option(help="Run folder of this model, whose scores choose the heads.", metavar="RUN")],
    score: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:END]",
            help="Column of heads.csv that chooses the heads. END, low or high, is the end of its values at which "
            "heads are dormant; columns that mark dormant heads have one by default. May be repeated. [default: honor]",
        ),
    ] = None,
    fraction: Annotated[
        str, typer.Option(metavar="F,F,...", help="Shares of all heads that are zeroed.")
    ] = "0.05,0.1,0.2",
    tokens: Annotated[
        str | None, typer.Option(metavar="first", help="Also hide the first token from all later queries.")
    ] = None,
    *,
    text: AblationLoss,
    written: AblationWritten,
) -> None:
    """Zero the heads that a score calls dormant, and measure the loss on text that the run did not read.

    The control zeroes equally many random heads.

    Example: sinkscope ablate example:gemma-3-270m --run runs/gemma --score honor --score bos_mass --fraction 0.05,0.1
    """
    from sinkscope.experiments.arms.head_choice import read_fractions
    from sinkscope.runs.saved.ablation import ABLATION_FOLDER

    shares = read_fractions(fraction)

    def place(usual: Path) -> Path:
        if written.force:
            return usual
        return unfinished_folder(usual) if written.resume else free_folder(usual)

    job = replace(prepared("ablation", model, text, written, ABLATION_FOLDER, place), command="ablate")
    import_libraries()
    from sinkscope.experiments.ablation import ablate as measure
    from sinkscope.present.figures.arms import draw_ablation
    from sinkscope.present.terminal.arms import render_ablation

    job.measure(
        measure, draw_ablation, render_ablation, run=run, scores=score or ["honor"], fractions=shares, tokens=tokens
    )
