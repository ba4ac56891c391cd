"""`sinkscope report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import say
from sinkscope.runs.folder import check_writable, write_file


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; two are compared as well.", metavar="RUN...")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "sinkscope.html"
    ),
) -> None:
    """Write one HTML file that needs no network: answers, heat maps, profiles, every head's curves, the comparison.

    Example: sinkscope report runs/gemma -o gemma.html
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.present.html.report import render_report
    from sinkscope.runs.run import load_run

    check_writable(out)
    loaded = [load_run(path) for path in runs]
    result = None
    if len(loaded) == 2:
        from sinkscope.comparison.compare_runs import compare

        try:
            result = compare(*loaded)
        except SinkscopeError as reason:
            try:
                result = compare(*loaded, unpaired=True)
                result.notes.insert(0, f"not paired: {str(reason).partition(';')[0]}")
            except SinkscopeError as error:
                say(f"warning: the runs are not compared: {error}")
    page = render_report(loaded, result)
    write_file(out, page)
    say(f"wrote {out} ({len(page.encode()) / 1e6:.2f} MB)")
