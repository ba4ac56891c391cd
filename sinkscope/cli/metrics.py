"""`sinkscope metrics`: prints every column with its unit, range, formula and source."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sinkscope.runs.schema.manifest import MetricFacts


def metrics(
    names: Annotated[
        list[str] | None, typer.Argument(help="Columns to show; all when none is named.", metavar="NAME")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder, whose own metrics are shown, too.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--metrics",
            metavar="FILE.py",
            help="Run a Python file and show the metrics it defines, too; may be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the definitions as JSON.")] = False,
) -> None:
    """Print the definition of every column: name, unit, range, formula, source.

    Example: sinkscope metrics bos_mass sink_rate
    """
    from sinkscope.present.terminal.metrics import metric_list, render_metrics
    from sinkscope.runs.schema.base import to_json

    columns = metric_list(names or [], _own(run, files or []))
    sys.stdout.write(to_json(columns) if as_json else render_metrics(columns))


def _own(run: Path | None, files: list[Path]) -> Mapping[str, MetricFacts]:
    """The metrics that are not sinkscope's: a run's as its manifest keeps them, else those of files and packages.

    Raises SinkscopeError where the run, a file or a package cannot be read, and for a run together with files.
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import load_run

    if run is not None:
        if files:
            raise SinkscopeError("--run and --metrics: a run keeps the definitions of its metrics; give one of them")
        return load_run(run).manifest.metrics
    if not files and not entry_points(group="sinkscope.metrics"):  # what follows imports torch
        return {}

    from sinkscope.engine.manifest import own_metrics

    return own_metrics(files)
