"""`sinkscope schema`: prints what each file of a run folder holds."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def schema(
    name: Annotated[
        str | None,
        typer.Argument(help="manifest, summary, request, baseline, or a table: heads, layers, ...", metavar="NAME"),
    ] = None,
) -> None:
    """Print the JSON schema of a file that sinkscope writes, or the columns of a table. Without NAME, list all names.

    Example: sinkscope schema manifest
    """
    from sinkscope.present.terminal.metrics import render_schema

    sys.stdout.write(render_schema(name))
