"""`sinkscope baseline`: writes a run as one small file to keep in git."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arguments import open_run
from sinkscope.cli.common import check_writable, say
from sinkscope.cli.options import SpotScan, with_options
from sinkscope.present.text import next_command
from sinkscope.runs.folder import write_file


@with_options
def baseline(
    run: Annotated[str, typer.Argument(help="Run folder, or a model to scan on the spot.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The JSON file to write.")],
    *,
    spot: SpotScan,
) -> None:
    """Write a run's means and standard errors to one small JSON file, against which `sinkscope check` judges runs.

    Example: sinkscope baseline runs/gemma -o sinks.json
    """
    from sinkscope.comparison.baseline import baseline_of, baseline_text

    check_writable(out)
    measured = open_run(run, spot)
    text = baseline_text(baseline_of(measured))
    write_file(out, text)
    if not spot.quiet:
        say(f"wrote {out} ({len(text.encode()) / 1000:.0f} kB)")
        subject = "RUN" if measured.manifest.request.watched else "MODEL"  # no scan does what a watched program did
        say(f"next: {next_command('check', subject, '--baseline', out)}")
