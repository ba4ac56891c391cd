"""`sinkscope track`: scans the checkpoints of one training and says when each head's sink appeared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.arguments import is_run
from sinkscope.cli.common import BAD_INPUT, put, say, say_of
from sinkscope.cli.early import check_early
from sinkscope.cli.help import FIRST, LOADED, WRITTEN
from sinkscope.cli.options import TextScan, with_options
from sinkscope.cli.scan_job import ScanJob
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.experiments.training.trajectory import Step
    from sinkscope.runs.run import Run


@with_options
def track(
    model: Annotated[
        list[str],
        typer.Argument(help="Checkpoint folders of one training run, or one hub id with --revisions.", metavar="MODEL"),
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
            help="Folder for trajectory.csv, emergence.csv, the figure, and a run folder for each step.",
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
    """Scan the checkpoints of one training run; write how sinks grew, and at which step each head's sink appeared.

    Steps that are already scanned are not scanned again. So an interrupted command continues where it stopped.

    Example: sinkscope track out/checkpoint-* --out runs/training
    """
    from sinkscope.experiments.training.trajectory import check_training, steps_of, tables
    from sinkscope.runs.saved.trajectory import check_tables

    steps = steps_of(model, [] if revisions is None else named(revisions))
    from sinkscope.engine.launch import ALONE

    request = check_early([step.model for step in steps], look=False, **text.settings())
    check_tables(out)
    if is_run(str(out)):
        raise SinkscopeError(f"{out} is the folder of a run: give another --out, for the folders of all steps")
    standing = standing_runs(out, {step.number for step in steps})
    check_training(standing, steps)
    job = ScanJob(
        request, (), resume=not force, force=force, formats=("csv",), quiet=quiet, processes=ALONE,
        again="the same command, without --force," if force else "the same command",
    )  # fmt: skip
    job.check_device()
    runs, failed = scan_steps(job, steps, out, standing)
    if not runs:
        raise SinkscopeError(f"none of the {len(steps)} steps could be scanned")
    trajectory, emerged = tables(standing_runs(out, set(runs)) | runs)
    written = write(out, trajectory, emerged)
    if as_json:
        from sinkscope.runs.schema.base import plain, to_json

        put(to_json([plain(row) for row in emerged.to_dict("records")]))
    elif not quiet:
        from sinkscope.present.terminal.trajectory import render_trajectory

        put(render_trajectory(trajectory, emerged, text.epsilon, written))
    if failed:
        say(f"error: {len(failed)} of {len(steps)} steps failed: {', '.join(step.shown for step in failed)}")
        raise typer.Exit(BAD_INPUT)


def named(revisions: str) -> list[str]:
    """The revisions of `--revisions A,B,...`. Raises SinkscopeError where it names none."""
    names = [name for word in revisions.split(",") if (name := word.strip())]
    if not names:
        raise SinkscopeError(f"--revisions {revisions!r} names no revision: give branches or tags, A,B,...")
    return names


def standing_runs(out: Path, without: set[int]) -> dict[int, Run]:
    """The runs of all steps whose finished run folders stand in `out`, but for these."""
    from sinkscope.runs.run import load_run
    from sinkscope.runs.saved.trajectory import finished_steps

    return {number: load_run(path) for number, path in finished_steps(out).items() if number not in without}


def scan_steps(
    job: ScanJob, steps: list[Step], out: Path, standing: dict[int, Run]
) -> tuple[dict[int, Run], list[Step]]:
    """Scans every step into its own folder; returns the runs by step, and the steps that failed. What fails in the same
    way in several is said once.

    `standing`: the runs of other steps. Raises SinkscopeError once a step is scanned that cannot stand in one table
    with them and those before it.
    """
    from sinkscope.experiments.training.trajectory import check_alike
    from sinkscope.runs.run import load_run

    runs: dict[int, Run] = {}
    failed: list[Step] = []
    told: set[str] = set()
    for place, step in enumerate(steps, 1):
        request = job.request.model_copy(update={"revision": step.revision})
        step_job = replace(job, what=f"{step.shown} ({place} of {len(steps)})", request=request)
        try:
            step_job.scan(step.model, out / step.folder)
            runs[step.number] = load_run(out / step.folder)  # as it was written, also where it was scanned before
        except typer.Exit:  # Ctrl-C; typer derives Exit from RuntimeError
            raise
        except Exception as error:  # whatever it is, the other steps are still scanned
            reason = in_one_line(error).replace(step.model, "")  # --seq-len is too long for all of them, and so on
            if reason not in told:
                say_of(step.shown, error)
            told.add(reason)
            failed.append(step)
        else:
            check_alike(standing | runs)
    return runs, failed


def write(out: Path, trajectory: pd.DataFrame, emerged: pd.DataFrame) -> list[Path]:
    """Writes the two tables and, with matplotlib, the figure, all or nothing; returns their paths."""
    from sinkscope.present.figures.canvas import available
    from sinkscope.present.figures.trajectory import draw_trajectory
    from sinkscope.runs.saved.trajectory import EMERGENCE_FILE, TRAJECTORY_FILE, write_tables

    content = {
        name: table.to_csv(index=False, float_format="%.9g", lineterminator="\n").encode()
        for name, table in ((TRAJECTORY_FILE, trajectory), (EMERGENCE_FILE, emerged))
    }
    if available():
        content |= {f"trajectory.{form}": draw_trajectory(trajectory, form) for form in ("png", "svg")}
    else:
        say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
    return write_tables(out, content)
