"""`sinkscope track`: scans the checkpoints of one training and says when each head's sink appeared."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import BAD_INPUT, say
from sinkscope.cli.early import check_early
from sinkscope.cli.help import FIRST, LOADED, WRITTEN
from sinkscope.cli.options import TextScan, with_options
from sinkscope.cli.scan_job import Job
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.experiments.training.steps import Step
    from sinkscope.runs.run import Run


@with_options
def track(
    model: Annotated[
        list[str],
        typer.Argument(help="Checkpoint folders of one training, or one hub id with --revisions.", metavar="MODEL"),
    ],
    revisions: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Branches or tags of the hub model, one per step.", rich_help_panel=LOADED
        ),
    ] = None,
    *,
    text: TextScan,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder for a run folder per step, trajectory.csv, emergence.csv and the figure.",
            rich_help_panel=FIRST,
        ),
    ] = Path("runs/trajectory"),
    force: Annotated[bool, typer.Option("--force", help="Scan all steps anew.", rich_help_panel=WRITTEN)] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print emergence.csv as JSON records to stdout.", rich_help_panel=WRITTEN),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.", rich_help_panel=WRITTEN)] = False,
) -> None:
    """Scan the checkpoints of one training; write how sinks grew, and at which step each head's appeared.

    Steps that are already scanned are not scanned again, so an interrupted command goes on where it stopped.

    Example: sinkscope track out/checkpoint-* --out runs/training
    """
    from sinkscope.experiments.training.steps import steps_of, tables

    steps = steps_of(model, [name for name in (revisions or "").split(",") if name])
    from sinkscope.engine.launch import ALONE

    request = check_early([step.model for step in steps], look=False, **text.settings())
    job = Job(request, (), resume=not force, force=force, formats=("csv",), quiet=quiet, processes=ALONE)
    runs, failed = scan_steps(job, steps, out)
    if not runs:
        raise SinkscopeError(f"none of the {len(steps)} steps could be scanned")
    trajectory, emerged = tables(runs)
    written = write(out, trajectory, emerged)
    if as_json:
        from sinkscope.runs.strict_json import plain, to_json

        sys.stdout.write(to_json([plain(row) for row in emerged.to_dict("records")]))
    elif not quiet:
        from sinkscope.present.terminal.trajectory import render_trajectory

        sys.stdout.write(render_trajectory(trajectory, emerged, text.epsilon, written))
    if failed:
        say(f"error: {len(failed)} of {len(steps)} steps failed: {', '.join(step.shown for step in failed)}")
        raise typer.Exit(BAD_INPUT)


def scan_steps(job: Job, steps: list[Step], out: Path) -> tuple[dict[int, Run], list[Step]]:
    """Scans every step into its own folder; returns the runs by step, and the steps that failed."""
    from sinkscope.runs.run import load_run

    runs, failed = {}, []
    for number, step in enumerate(steps, 1):
        asked = job.request.model_copy(update={"revision": step.revision})
        own = replace(job, what=f"{step.shown} ({number} of {len(steps)})", request=asked)
        try:
            own.scan(step.model, out / step.folder)
            runs[step.number] = load_run(out / step.folder)  # as it was written, also where it was scanned before
        except typer.Exit:  # Ctrl-C; typer derives Exit from RuntimeError
            raise
        except Exception as error:  # whatever it is, the other steps are still scanned
            say(f"error: {step.shown}: {in_one_line(error)}")
            failed.append(step)
    return runs, failed


def write(out: Path, trajectory: pd.DataFrame, emerged: pd.DataFrame) -> list[Path]:
    """Writes the two tables and, with matplotlib, the figure; returns their paths."""
    from sinkscope.present.figures.canvas import available
    from sinkscope.present.figures.trajectory import draw_trajectory
    from sinkscope.runs.folder import write_file

    written = []
    for name, table in (("trajectory.csv", trajectory), ("emergence.csv", emerged)):
        write_file(out / name, table.to_csv(index=False, float_format="%.9g", lineterminator="\n"))
        written.append(out / name)
    if not available():
        say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
        return written
    for form in ("png", "svg"):
        write_file(out / f"trajectory.{form}", draw_trajectory(trajectory, form))
        written.append(out / f"trajectory.{form}")
    return written
