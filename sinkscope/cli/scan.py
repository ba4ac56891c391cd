"""`sinkscope scan`: reads the options, scans each model, writes its folder and prints its summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import BAD_INPUT, DryRun, print_forecasts, put, say, say_of
from sinkscope.cli.early import check_early
from sinkscope.cli.help import FIRST, WRITTEN
from sinkscope.cli.options import TextScan, slug, slugs, with_options
from sinkscope.cli.scan_job import SETTINGS, ScanJob, run_folder
from sinkscope.cli.scan_options import MoreOfScan, QuestionOptions
from sinkscope.engine.launch import start_processes

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


@with_options
def scan(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hub id, folder, .gguf file, or example:NAME; several are scanned in turn.", metavar="MODEL"
        ),
    ] = None,
    *,
    text: TextScan,
    more: MoreOfScan,
    asked: QuestionOptions,
    dry: DryRun,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a scan that was interrupted.", rich_help_panel=WRITTEN)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Run folder to write; with several models, the folder for all their run folders. [default: "
            "runs/MODEL-SLUG, with a number added if that exists]",
            rich_help_panel=FIRST,
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="csv, or parquet to write the tables as Parquet too.",
            rich_help_panel=WRITTEN,
        ),
    ] = "csv",
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run.", rich_help_panel=WRITTEN)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json alone to stdout.", rich_help_panel=WRITTEN)
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print errors only: no progress, warnings or summary.", rich_help_panel=WRITTEN),
    ] = False,
) -> None:
    """Measure every attention head while the model reads text once; write per-head and per-layer tables.

    Example: sinkscope scan example:gemma-3-270m --data prose --data code --out runs/gemma
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import FORMATS

    if formats not in FORMATS:
        raise SinkscopeError(f"--format {formats!r}: choose one of {', '.join(FORMATS)}")
    options = text.settings() | more.settings() | asdict(asked)
    more.check_launch(text.device)
    processes = start_processes(text.device, more.tp)
    listed = [] if more.names is None else processes.on_main(partial(names_in, more.names))
    models = list(dict.fromkeys([*(model or []), *listed]))
    if resume and force:
        raise SinkscopeError("--resume goes on with a scan and --force begins it anew: give one of them")
    if not models:
        raise SinkscopeError("no model: name one, or give --models FILE")
    if more.name is not None and len(models) > 1:
        raise SinkscopeError(f"--name {more.name!r} is what one model is called, and {len(models)} are to be scanned")
    request = processes.run(partial(check_early, models, look=False, **options))
    dry.check()
    if dry.dry_run:
        from sinkscope.engine.forecast.dry_run import forecast_request

        requests = [request.model_copy(update={"model": name}) for name in models]
        forecasts = [forecast_request(wanted, metrics=options["metrics"], machine=dry.machine) for wanted in requests]
        processes.on_main(partial(print_forecasts, forecasts, as_json))
        return
    job = ScanJob(request, options["metrics"], resume, force, tuple({"csv", formats}), quiet, processes, more.strict)
    if len(models) == 1:
        place = out or processes.on_main(lambda: chosen_folder(job, own_name(models[0], more.adapter)))
        run, written = job.scan(models[0], place)
        show(run, written, as_json, quiet)
        return
    scan_all(job, models, lambda name: out / name if out else chosen_folder(job, name), as_json)


def own_name(model: str, adapter: Path | None) -> str:
    """The name of a run's default folder: the model's, with its adapter's."""
    return slug(model) if adapter is None else f"{slug(model)}--{slug(str(adapter))}"


def chosen_folder(job: ScanJob, name: str) -> Path:
    """The run folder where no --out is given; says so where it is not runs/NAME."""
    base = Path("runs") / name
    chosen = run_folder(base, job.request.part(*SETTINGS), job.resume, job.force)
    if chosen != base and not job.resume and not job.quiet:
        say(f"{base} is there already: this run goes to {chosen} (--force replaces it, --resume continues it)")
    return chosen


def scan_all(job: ScanJob, models: list[str], place: Callable[[str], Path], as_json: bool) -> None:
    """Scans several models, each into the `place` of its slug. One that fails stops no other; exit code 2 then.

    Raises SinkscopeError as `ScanJob.check_device` does.
    """
    from sinkscope.runs.schema.base import to_json

    job.check_device()
    runs, failed = [], []
    for number, (model, name) in enumerate(slugs(models).items(), 1):
        named = replace(job, what=f"{model} ({number} of {len(models)})")
        try:
            run, written = named.scan(model, job.processes.on_main(partial(place, name)))
        except typer.Exit:  # the scan was interrupted; typer derives Exit from RuntimeError
            raise
        except Exception as error:  # whatever it is, the other models are still scanned
            say_of(model, error)
            failed.append(model)
            continue
        runs.append(run)
        if not as_json:
            show(run, written, False, job.quiet)
    if as_json:
        put(to_json([run.summary.as_dict() for run in runs]))
    elif len(runs) > 1 and not job.quiet:
        from sinkscope.present.terminal.run import render_models

        put(render_models(runs))
    if failed:
        say(f"error: {len(failed)} of {len(models)} models failed: {', '.join(failed)}")
        raise typer.Exit(BAD_INPUT)


def names_in(path: Path) -> list[str]:
    """Reads model names from a file, one per line, without what follows a #. Raises SinkscopeError."""
    from sinkscope.errors import SinkscopeError

    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SinkscopeError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def show(run: Run, written: list[Path], as_json: bool, quiet: bool) -> None:
    """Prints the summary to stdout and the warnings to stderr."""
    if not quiet:
        for warning in run.manifest.warnings:
            say(f"warning: {warning}")
    if as_json:
        from sinkscope.runs.schema.base import to_json

        put(to_json(run.summary.as_dict()))
    elif not quiet:
        from sinkscope.present.terminal.run import render_run
        from sinkscope.present.terminal.table import terminal_style

        put(render_run(run, written, **terminal_style()))
