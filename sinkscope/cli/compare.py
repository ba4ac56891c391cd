"""`sinkscope compare`: shows what differs between two runs."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.arguments import is_run, open_run
from sinkscope.cli.common import check_writable
from sinkscope.cli.options import AsJson, SpotScan, with_options
from sinkscope.runs.folder import write_file

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


@with_options
def compare(
    a: Annotated[
        str,
        typer.Argument(help="Run folder, or a model to scan; if B is a run, over B's text.", metavar="A"),
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            help="Run folder, or a model to scan over A's text. [default: A with its --adapter]", metavar="B"
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Metric to compare; may be repeated. [default: bos_mass, sink_score, entropy, honor]"),
    ] = None,
    unpaired: Annotated[
        bool, typer.Option("--unpaired", help="Allow runs that read different texts; Welch's test then compares them.")
    ] = False,
    equivalence_margin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=MARGIN",
            help="Test whether the difference of a metric is smaller than MARGIN, in the metric's unit: two one-sided "
            "t-tests, over heads with Holm's adjustment. May be repeated.",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every difference as CSV.")] = None,
    as_json: AsJson = False,
    *,
    spot: SpotScan,
) -> None:
    """Compare two runs head by head, paired by sequence: differences, standard errors, intervals, p and q values.

    --adapter is put into B, or into A if B is a run. With --adapter and without B, A is compared with A plus the
    adapter.

    Example: sinkscope compare runs/base runs/finetuned --metric bos_mass --csv changes.csv
    """
    from sinkscope.comparison.compare_runs import NotPaired
    from sinkscope.comparison.compare_runs import compare as compare_runs

    check_writable(csv)
    margins = read_margins(equivalence_margin or [])
    first, second = opened(a, b, spot)
    try:
        result = compare_runs(first, second, metrics=metric, paired=not unpaired, equivalence_margin=margins)
    except NotPaired as error:
        raise NotPaired(error.reason, "--unpaired compares separate samples") from None
    if csv is not None:
        write_file(csv, result.as_table().to_csv(index=False, float_format="%.9g", lineterminator="\n"))
    if as_json:
        from sinkscope.runs.schema.base import to_json

        sys.stdout.write(to_json(result.as_dict()))
        return
    from sinkscope.present.terminal.comparison import render_comparison
    from sinkscope.present.terminal.table import terminal_style

    sys.stdout.write(render_comparison(result, **terminal_style()))


def read_margins(asked: list[str]) -> dict[str, float]:
    """Margins by metric. Raises SinkscopeError for what is not METRIC=NUMBER, the number above 0."""
    from sinkscope.errors import SinkscopeError

    margins = {}
    for margin in asked:
        name, _, text = map(str.strip, margin.partition("="))
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not name or not 0 < number < math.inf:
            raise SinkscopeError(
                f"--equivalence-margin {margin!r}: give METRIC=MARGIN, a number above 0, e.g. bos_mass=0.01"
            )
        if name in margins:
            raise SinkscopeError(f"--equivalence-margin {margin!r}: {name} has a margin already")
        margins[name] = number
    return margins


def opened(a: str, b: str | None, spot: SpotScan) -> tuple[Run, Run]:
    """Loads or scans both runs; a model reads the text of the other run. The adapter goes into one of them.

    Raises SinkscopeError where B is missing without an adapter, and where there is no model to put the adapter into.
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import load_run

    if b is None and spot.adapter is None:
        raise SinkscopeError(f"nothing to compare {a} with: name a second run or model, or an --adapter of {a}")
    if b is None and is_run(a):
        raise SinkscopeError(f"{a} is a run folder, and --adapter needs a model: name the model as B")
    b = a if b is None else b
    if is_run(b):
        second = load_run(b)
        return open_run(a, spot, second.manifest.request), second
    first = load_run(a) if is_run(a) else open_run(a, replace(spot, adapter=None))
    return first, open_run(b, spot, first.manifest.request)
