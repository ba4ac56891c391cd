"""`sinkscope baseline`: a run as one small file for git."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import say
from sinkscope.cli.runs import Device, Dtype, Quiet, SpotScan, TrustRemoteCode, check_writable, open_run, write_file


def baseline(
    run: Annotated[str, typer.Argument(help="Run folder, or a model to scan on the spot.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The JSON file to write.")],
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's means and standard errors to one small JSON file: what `sinkscope check` judges by.

    Example: sinkscope baseline runs/gemma -o sinks.json
    """
    from sinkscope import __version__
    from sinkscope.baseline import baseline_text, make_baseline

    check_writable(out)
    measured = open_run(run, SpotScan(device, dtype, trust_remote_code, quiet))
    text = baseline_text(make_baseline(measured), __version__)
    write_file(out, text)
    if not quiet:
        say(f"wrote {out} ({len(text.encode()) / 1000:.0f} kB)")
