"""`sinkscope track`: scans the checkpoints of one training and says when each head's sink appeared."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import BAD_INPUT, say
from sinkscope.cli.options import AllowPickle, Device, Dtype, TrustRemoteCode, parse_batch_size, single
from sinkscope.cli.scan_job import Job
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.experiments.training.steps import Step
    from sinkscope.runs.run import Run


def track(
    model: Annotated[
        list[str],
        typer.Argument(help="Checkpoint folders of one training, or one hub id with --revisions.", metavar="MODEL"),
    ],
    revisions: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Branches or tags of the hub model, one per step.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Text, as for scan. Repeat to compare domains. [default: prose]"),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence. [default: 256]")] = None,
    num_sequences: Annotated[int | None, typer.Option(help="Sequences for each --data. [default: 32]")] = None,
    bos: Annotated[list[str] | None, typer.Option(help="BOS as first token: auto, always, never.")] = None,
    batch_size: Annotated[str, typer.Option(help="Sequences per forward pass, or auto.")] = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    seed: Annotated[int, typer.Option(help="Seed that draws documents.")] = 0,
    epsilon: Annotated[float, typer.Option(help="A head has a sink where alpha_0 exceeds this.")] = EPSILON,
    out: Annotated[
        Path, typer.Option(help="Folder for a run folder per step, trajectory.csv, emergence.csv and the figure.")
    ] = Path("runs/trajectory"),
    force: Annotated[bool, typer.Option("--force", help="Scan all steps anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print emergence.csv as JSON records to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Scan the checkpoints of one training; write how sinks grew, and at which step each head's appeared.

    Steps that are already scanned are not scanned again, so an interrupted command goes on where it stopped.

    Example: sinkscope track out/checkpoint-* --out runs/training
    """
    from sinkscope.experiments.training.steps import steps_of, tables

    steps = steps_of(model, [name for name in (revisions or "").split(",") if name])
    options = {
        "data": data or None, "seq_len": seq_len, "num_sequences": num_sequences, "bos": single(bos) or "auto",
        "batch_size": parse_batch_size(batch_size), "device": device, "dtype": dtype, "seed": seed, "epsilon": epsilon,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle,
    }  # fmt: skip
    from sinkscope.engine.launch import ALONE

    job = Job(options, resume=not force, force=force, formats=("csv",), quiet=quiet, processes=ALONE)
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

        sys.stdout.write(render_trajectory(trajectory, emerged, epsilon, written))
    if failed:
        say(f"error: {len(failed)} of {len(steps)} steps failed: {', '.join(step.shown for step in failed)}")
        raise typer.Exit(BAD_INPUT)


def scan_steps(job: Job, steps: list[Step], out: Path) -> tuple[dict[int, Run], list[Step]]:
    """Scans every step into its own folder; returns the runs by step, and the steps that failed."""
    from sinkscope.runs.run import load_run

    runs, failed = {}, []
    for step in steps:
        own = replace(job, options=job.options | {"revision": step.revision})
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
