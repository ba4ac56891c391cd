"""`sinkscope check`: the release gate. Exit 0 passed, 1 a metric moved too far, 2 bad input."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.arguments import is_run, open_run
from sinkscope.cli.common import check_writable, put, say
from sinkscope.cli.options import AsJson, SpotScan, with_options
from sinkscope.runs.folder import write_files

if TYPE_CHECKING:
    from sinkscope.comparison.baseline import Baseline
    from sinkscope.comparison.gate import Verdict


FAILED = 1


@with_options
def check(
    run: Annotated[
        str, typer.Argument(help="Run folder, or a model to scan over the baseline's text.", metavar="RUN_OR_MODEL")
    ],
    baseline: Annotated[
        str, typer.Option(metavar="FILE|RUN", help="File written by `sinkscope baseline`, or a run folder.")
    ],
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Rules that say how far metrics may move. "
            "[default: [tool.sinkscope.check] in ./pyproject.toml, else built-in rules]",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write what moved, and where it begins, as one HTML page that needs no network."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="If a model is scanned: save its run in this folder."),
    ] = None,
    as_json: AsJson = False,
    *,
    spot: SpotScan,
) -> None:
    """Check whether a model's sinks moved too far from a baseline. Exit codes: 0 passed, 1 failed, 2 bad input.

    Example: sinkscope check example:gemma-3-270m --baseline sinks.json --html sinks.html
    """
    from sinkscope.comparison.policy import read_policy

    check_writable(junit, html)
    check_new_run(run, out)
    expected = open_baseline(baseline)
    rules = read_policy(policy, baseline=expected)
    from sinkscope.comparison.gate import check as judge

    measured = open_run(run, spot, expected.request)
    if out is not None:
        measured.manifest.command = shlex.join(["sinkscope", *sys.argv[1:]])
        measured.save(out)
        say(f"wrote {out}")
    verdict = judge(measured, expected, rules)
    files: dict[Path, str | bytes] = {}
    if html is not None:
        from sinkscope.present.html.check import render_check

        files[html] = render_check(verdict, expected.facts, measured.manifest)
    if junit is not None:
        from sinkscope.present.verdict import junit_xml

        files[junit] = junit_xml(verdict)
    write_files(files)
    for file in files:
        say(f"wrote {file}")
    show(verdict, as_json)
    if not verdict.passed:
        raise typer.Exit(FAILED)


def check_new_run(run: str, out: Path | None) -> None:
    """Raises SinkscopeError, before anything is measured, where there is no new run or it cannot be put into `out`."""
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import check_target, finished

    if out is None:
        return
    if is_run(run):
        raise SinkscopeError(f"--out saves the run of a model that is scanned, and {run} is a run folder already")
    if finished(out):  # check_target would name an option that this command lacks
        raise SinkscopeError(f"{out} holds a finished run: give another --out")
    check_target(out, force=False)


def open_baseline(name: str) -> Baseline:
    """Reads a baseline file, or makes the baseline of a run folder. Raises SinkscopeError where there is neither."""
    from sinkscope.comparison.baseline import baseline_of, read_baseline
    from sinkscope.errors import SinkscopeError

    if not name or not Path(name).exists():  # Python takes an empty path for the working folder
        raise SinkscopeError(f"--baseline {name or repr(name)}: no such file or run folder")
    if is_run(name):
        from sinkscope.runs.run import load_run

        return baseline_of(load_run(name))
    return read_baseline(Path(name))


def show(verdict: Verdict, as_json: bool) -> None:
    """Writes the result to stdout; under GitHub Actions also annotations and the step's summary."""
    from sinkscope.present.verdict import github_annotations, markdown_verdict, render_verdict
    from sinkscope.runs.schema.base import to_json

    put(to_json(verdict.as_dict()) if as_json else render_verdict(verdict))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        if as_json:  # stdout holds nothing but the JSON; the runner reads its commands from stderr as well
            with suppress(OSError):
                sys.stderr.write(github_annotations(verdict))
        else:
            put(github_annotations(verdict))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown_verdict(verdict))
        except OSError as error:  # the verdict alone decides the exit code
            say(f"warning: the step's summary (GITHUB_STEP_SUMMARY) cannot be written to {summary}: {error.strerror}")
