"""`sinkscope report`: writes runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.runs.folder import write_file

if TYPE_CHECKING:
    from sinkscope.comparison.compare_runs import Comparison
    from sinkscope.runs.run import Run


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; two runs are also compared.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "sinkscope.html"
    ),
    arms: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="Folder that arms, evict, quant or ablate wrote for a run's model; may be repeated."
        ),
    ] = None,
) -> None:
    """Write one HTML file that needs no network: answers, heat maps, profiles, every head's curves, a comparison.

    Example: sinkscope report runs/gemma -o gemma.html
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.present.html.report import render_report
    from sinkscope.runs.run import load_run
    from sinkscope.runs.saved.loaded_arms import load_arms, placed

    check_writable(out)
    loaded = [load_run(path) for path in runs]
    saved = placed([load_arms(path) for path in arms or []], loaded)
    result = None
    if len(loaded) == 2:
        try:
            result = compared(*loaded)
        except SinkscopeError as error:
            say(f"warning: the runs are not compared: {error}")
    page = render_report(loaded, result, saved)
    write_file(out, page)
    say(f"wrote {out} ({len(page.encode()) / 1e6:.2f} MB)")


def compared(a: Run, b: Run) -> Comparison:
    """Compares two runs: paired where both read the same sequences, else as separate samples, with a note why.

    Raises SinkscopeError where the runs share no domain or no metric.
    """
    from sinkscope.comparison.compare_runs import compare, why_not_paired
    from sinkscope.runs.per_sequence import domains

    read = {data.fingerprint for data in domains(b)}
    unmatched = next((data.domain for data in domains(a) if data.fingerprint not in read), None)
    if unmatched is None:
        return compare(a, b)
    result = compare(a, b, paired=False)
    result.notes.insert(0, f"not paired: {why_not_paired(a, b, unmatched)}")
    return result
