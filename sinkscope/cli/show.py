"""`sinkscope show`: prints the answer of a finished run again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.options import AsJson


def show(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    as_json: AsJson = False,
) -> None:
    """Print the answer of a run again, as its scan printed it; --json prints summary.json.

    Example: sinkscope show runs/gemma
    """
    from sinkscope.present.terminal.run import render_run
    from sinkscope.present.terminal.table import terminal_style
    from sinkscope.runs.run import load_run
    from sinkscope.runs.schema.base import to_json

    loaded = load_run(run)
    sys.stdout.write(to_json(loaded.summary.as_dict()) if as_json else render_run(loaded, **terminal_style()))
