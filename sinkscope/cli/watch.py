"""`sinkscope watch`: runs a Python program and measures the models that it runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli.arguments import is_run
from sinkscope.cli.common import as_python_does, say
from sinkscope.cli.help import FIRST, WRITTEN
from sinkscope.cli.options import slug
from sinkscope.cli.signals import INTERRUPTED, leave_to_python, left_to_program
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    from sinkscope.engine.watching.program import Everywhere


def watch(
    program: Annotated[
        list[str],
        typer.Argument(
            help="SCRIPT.py ARGS or -m MODULE ARGS, behind all options of watch and two dashes.",
            metavar="-- PROGRAM",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Run folder to write. If several models are measured, the folder for all their run folders.",
            rich_help_panel=FIRST,
        ),
    ] = Path("runs/watched"),
    every: Annotated[
        int, typer.Option(metavar="N", help="Measure every N-th batch of sequences.", rich_help_panel=FIRST)
    ] = 1,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Stop after the batch with a model's N-th sequence.", rich_help_panel=FIRST),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Measure a sequence that a model writes until it has N tokens, at least 2. This bounds the memory it "
            "takes.",
            rich_help_panel=FIRST,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Show tokens by their texts in the tokenizer of this model, in place of their ids.",
            rich_help_panel=FIRST,
        ),
    ] = None,
    threads: Annotated[
        bool,
        typer.Option(
            "--threads",
            help="Also watch threads that the program starts. One pass at a time then runs.",
            rich_help_panel=FIRST,
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the runs that stand in FOLDER.", rich_help_panel=WRITTEN)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Do not report what was measured.", rich_help_panel=WRITTEN)
    ] = False,
) -> None:
    """Run a Python program, measure every model that it runs, and write a run folder for each model.

    Output, exit code and errors are the program's own. The program runs in this process, as under coverage.

    Example: sinkscope watch --out runs/answers --limit 64 -- answer.py --prompt hello
    """
    for option, number, least in (("--every", every, 1), ("--limit", limit, 1), ("--until", until, 2)):
        if number is not None and number < least:
            raise SinkscopeError(f"{option} {number}: at least {least} is needed")
    old = [path.absolute() for path in _check_out(out, force)]
    from sinkscope.engine.watching.program import Everywhere, check_program, run_program

    check_program(program)
    everywhere = Everywhere(every, limit, until, _tokenizer(tokenizer), threads)
    leave_to_python()
    code, process, home = 0, os.getpid(), Path.cwd()
    with as_python_does(), left_to_program():
        try:
            with everywhere.watching():
                run_program(program)
        except SystemExit as stop:
            code = _code_of(stop)
        except BaseException as error:
            error = error.with_traceback(_own(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)
            code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if os.getpid() == process:  # a child that the program forked leaves the run to its parent
        _write(everywhere, home, out, force, quiet, old)
    raise typer.Exit(code)


def _tokenizer(name: str | None) -> Any:
    """The tokenizer of a model; None where none is named. Raises SinkscopeError where it cannot be loaded."""
    if name is None:
        return None
    from sinkscope.checkpoints.quiet import quiet_transformers
    from sinkscope.checkpoints.tokenizers import named_tokenizer

    with quiet_transformers():
        return named_tokenizer(name)


def _check_out(out: Path, force: bool) -> list[Path]:
    """The run folders that are to be replaced. Raises SinkscopeError, before the program runs, which may take hours,
    where `out` takes no run."""
    from sinkscope.runs.folder import check_place, unfinished_in
    from sinkscope.runs.run import check_target, finished

    if force and _several_runs(out):
        check_place(out)
        return [*out.iterdir()]
    standing = ("a finished run", finished), ("an unfinished run", unfinished_in), ("runs of models", _several_runs)
    for what, stands in standing:  # check_target would name an option that this command lacks
        if not force and stands(out):
            raise SinkscopeError(f"{out} holds {what}: give another --out, or --force to replace what is there")
    check_target(out, force)
    return [out] if is_run(str(out)) else []


def _several_runs(out: Path) -> bool:
    """Whether the folder holds what this command wrote for several models, and nothing else."""
    inner = list(out.iterdir()) if out.is_dir() else []
    return bool(inner) and all(re.match(r"\d+-", path.name) and is_run(str(path)) for path in inner)


def _code_of(stop: SystemExit) -> int:
    """The exit code that Python ends with; a text is printed to stderr, as Python does."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the program's: without the frames that started it."""
    while trace is not None and _starts(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _starts(file: str) -> bool:
    return "<frozen runpy>" in file or file.endswith("runpy.py") or Path(file).parent in _STARTERS


_STARTERS = (Path(__file__).parent, Path(__file__).parents[1] / "engine" / "watching")


def _write(
    everywhere: Everywhere, home: Path, out: Path, force: bool, quiet: bool, old: Sequence[Path] = ()
) -> None:  # fmt: skip
    """Writes a run folder for each model that was measured, and says so on stderr. `home`: the folder in which the
    command began; the program may have gone to another one. `old`: the run folders that these replace."""
    from sinkscope.engine.watching.following import ELSEWHERE
    from sinkscope.runs.run import remove_run

    told = [f"{name} was not watched: {why}" for name, why in everywhere.refused.items()]
    told += [line for watched in everywhere.watches for line in watched.left_out]
    named = [f"{number}-{slug(watched.name)}" for number, watched in enumerate(everywhere.measured, 1)]
    asked = [out / name for name in named] if len(named) > 1 else [out] * len(named)
    for run_folder in old if asked else ():
        replaced = run_folder in {home / folder for folder in asked}  # when the new run is written
        if not replaced and is_run(str(run_folder)):  # and not the program's own files by now
            with suppress(OSError):  # what cannot be removed stays, and the new runs go beside it
                remove_run(run_folder)
    for watch, wanted, place in zip(everywhere.measured, asked, _places(home / out, named, force), strict=True):
        folder = place if out.is_absolute() else place.relative_to(home)
        if folder != wanted:
            say(f"warning: {wanted} holds something else by now: this run goes to {folder}")
        try:
            run = watch.run()
            run.manifest.command = " ".join(["sinkscope", *sys.argv[1:]])
            run.save(place, force)
        except Exception as error:  # the other models' runs are written, and the exit code is the program's
            say(f"error: {in_one_line(error)}")
            continue
        if not quiet:
            count = run.summary.sequences
            of = f"{count} sequence{'s' * (count != 1)} of {run.manifest.model.shown}"
            say(f"measured {of}; see: sinkscope show {folder}")
    told += [ELSEWHERE] if everywhere.elsewhere else []
    if not everywhere.measured:
        told.append(f"nothing was written: {_why_nothing(everywhere)}")
    for line in [] if quiet else dict.fromkeys(told):
        say(f"warning: {line}")


def _why_nothing(everywhere: Everywhere) -> str:
    where = "" if everywhere.threads else " in its main thread"
    ran = ", ".join(dict.fromkeys(watched.name for watched in everywhere.watches))
    if ran:
        return f"no attention was read of what this program ran{where} ({ran})"
    return f"this program ran no model{where}"


def _places(out: Path, named: list[str], force: bool) -> list[Path]:
    """The folder of each run: `out`, or one in it where there are several. It is one beside that where something else
    stands there by now, such as files that the program has written."""
    from sinkscope.cli.scan_job import free_folder
    from sinkscope.runs.run import check_target

    if len(named) > 1:
        parent = free_folder(out) if out.exists() and not out.is_dir() else out
        places = [parent / name for name in named]
    else:
        places = [out] * len(named)
    for number, place in enumerate(places):
        try:
            check_target(place, force)
        except SinkscopeError:
            with suppress(OSError):  # what cannot be read, `Run.save` names
                places[number] = free_folder(place)
    return places
