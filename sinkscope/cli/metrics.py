"""`sinkscope metrics`: prints every column with its unit, range, formula and source."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def metrics(
    names: Annotated[
        list[str] | None, typer.Argument(help="Columns to show; all when none is named.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the definitions as JSON.")] = False,
) -> None:
    """Print the definition of every column: name, unit, range, formula, source.

    Example: sinkscope metrics bos_mass sink_rate
    """
    from sinkscope.present.terminal.metrics import metric_list, render_metrics
    from sinkscope.runs.schema.base import to_json

    columns = metric_list(names or [])
    sys.stdout.write(to_json(columns) if as_json else render_metrics(columns))
