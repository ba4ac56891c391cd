"""`sinkscope claims`: puts papers' claims to models and saved runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli.arguments import is_run
from sinkscope.cli.common import DryRun, print_forecasts, say
from sinkscope.cli.help import READ, WRITTEN
from sinkscope.cli.options import Device, Dtype, NumSequences, Revision, SeqLen, TrustRemoteCode, slugs, with_options
from sinkscope.errors import SinkscopeError
from sinkscope.present.text import wrapped
from sinkscope.runs.folder import check_place, write_files

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.claims.claim import Claim
    from sinkscope.claims.subject import Subject

FILES = ("claims.csv", "claims.md", "claims.html")
RUNS = "runs"
"""The folder beside the page that keeps the runs of models."""


@with_options
def claims(
    subject: Annotated[
        list[str] | None,
        typer.Argument(help="Models (hub id, folder, example:NAME) and run folders, in any "
            "order.", metavar="MODEL_OR_RUN"),
    ] = None,
    claim: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Test only this claim; may be repeated. [default: all]")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the claims and their rules.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", rich_help_panel=WRITTEN,
            help="Folder for the page (Markdown, HTML), its figures, a CSV and the runs. The next call reads the runs "
                "again.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the page that an earlier call wrote, and runs of "
            "other weights, text or settings.", rich_help_panel=WRITTEN)
    ] = False,
    data: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Text that models read. [default: prose]", rich_help_panel=READ)
    ] = None,
    seq_len: SeqLen = None,
    num_sequences: NumSequences = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.", rich_help_panel=WRITTEN)] = False,
    *,
    dry: DryRun,
) -> None:  # fmt: skip
    """Test what papers claim about attention sinks: a verdict by a written rule, the deciding number, a contrast.

    A model is scanned, which takes minutes. A saved run is only read: a claim that needs other numbers is not tested.

    Example: sinkscope claims example:trigger-softmax example:trigger-relu --out runs/claims
    """
    from sinkscope.claims.claim import chosen_claims
    from sinkscope.claims.page import render_claims

    chosen = chosen_claims(claim or ())
    if list_all:
        if subject:
            raise SinkscopeError(f"--list lists claims and tests none: leave out {subject[0]}, or --list")
        sys.stdout.write(_listed(chosen))
        return
    names = list(dict.fromkeys(subject or ()))
    if not names:
        raise SinkscopeError("no model and no run is named: name one, or give --list")
    if out is not None:
        _check_folder(out, force)
    reading = {"data": data, "seq_len": seq_len, "num_sequences": num_sequences}
    loading = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    dry.check()
    subjects = _subjects(names, reading, loading, out, force)
    if dry.dry_run:
        _print_costs(chosen, subjects, dry.machine)
        return
    table = _put(chosen, subjects, quiet)
    if out is not None:
        _write(out, table, chosen, subjects)
    sys.stdout.write(render_claims(table, chosen, out))


def _subjects(
    names: list[str], reading: dict[str, Any], loading: dict[str, Any], out: Path | None, force: bool
) -> list[Subject]:
    """Run folders are loaded, other names are models."""
    from sinkscope.claims.subject import Subject
    from sinkscope.cli.early import check_early
    from sinkscope.runs.run import load_run

    models = [name for name in names if not is_run(name)]
    if models:
        check_early(models, **reading, **loading)
    else:
        _check_nothing_to_scan(reading | loading)
    folders = {name: None if out is None else out / RUNS / folder for name, folder in slugs(models).items()}
    return [
        Subject(name, name, reading=reading, loading=loading, folder=folders[name], force=force)
        if name in folders
        else Subject(name, given=load_run(name))
        for name in names
    ]


def _check_nothing_to_scan(options: dict[str, Any]) -> None:
    """Raises SinkscopeError where options of a scan were given beside run folders alone: they could change nothing."""
    given = [name for name, value in options.items() if not (value is None or value is False or value == "auto")]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise SinkscopeError(f"{option} goes with a model that is scanned, and only run folders are named")


def _print_costs(chosen: list[Claim], subjects: list[Subject], machine: str | None) -> None:
    from sinkscope.claims.findings import costs
    from sinkscope.present.terminal.forecast import render_total

    all_costs = [costs(chosen, subject, machine) for subject in subjects]
    forecasts = [forecast for cost in all_costs for forecast in cost.forecasts]
    print_forecasts(forecasts, as_json=False)
    sys.stdout.write(render_total(forecasts, [note for cost in all_costs for note in cost.notes]))


def _put(chosen: list[Claim], subjects: list[Subject], quiet: bool) -> pd.DataFrame:
    import pandas as pd

    from sinkscope.claims.findings import put
    from sinkscope.present.terminal.progress import progress_bar

    tables = []
    for subject in subjects:
        with progress_bar(quiet, subject.label) as progress:
            subject.progress = progress
            tables.append(put(chosen, [subject]))
    return pd.concat(tables, ignore_index=True)


def _write(out: Path, table: pd.DataFrame, chosen: list[Claim], subjects: list[Subject]) -> None:
    from sinkscope.claims.findings import to_csv
    from sinkscope.claims.page import draw_figures, in_html, in_markdown, make_page
    from sinkscope.present.paper.formats.csv import without_formulas

    images, captions, left_out = draw_figures(chosen, subjects)
    page, there = make_page(table, chosen, captions), out.exists()
    out.mkdir(parents=True, exist_ok=True)
    contents = {
        "claims.csv": to_csv(without_formulas(table)),
        "claims.md": in_markdown(page),
        "claims.html": in_html(page, images),
    }
    files: dict[str, str | bytes] = {**images, **contents}
    try:
        write_files({out / name: content for name, content in files.items()})
    except SinkscopeError:
        if not there:
            out.rmdir()
        raise
    for reason in left_out:
        say(f"warning: {reason}")
    say(f"wrote {', '.join(str(out / name) for name in contents)}")


def _check_folder(out: Path, force: bool) -> None:
    """Raises SinkscopeError, before anything is measured, where the page cannot be written."""
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    there = [name for name in FILES if (out / name).exists()]
    if there and not force:
        raise SinkscopeError(f"{out / there[0]} is there already: give another --out, or --force to replace it")
    others = sorted(path.name for path in out.iterdir()) if out.is_dir() and not there else []
    if set(others) - {RUNS}:
        raise SinkscopeError(f"{out} is not empty and holds no page of claims: give another --out")
    check_place(out)


def _listed(chosen: list[Claim]) -> str:
    """Each claim with its paper, its rule and what it has measured."""
    lines = []
    for claim in chosen:
        lines += wrapped(f"{claim.name} ({claim.by}, {claim.paper})", rest="  ")
        for text in (claim.says, f"Rule: {claim.rule.words}", f"Measured: {claim.needs.words}"):
            lines += wrapped(text, first="  ")
        lines.append("")
    return "\n".join(lines)
