"""What commands share: one line for an error, the right exit code, and the option `--dry-run`."""

from __future__ import annotations

import codecs
import functools
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, ParamSpec, TypeVar

import typer

from sinkscope.cli.help import LOADED
from sinkscope.cli.signals import exit_code
from sinkscope.engine.launcher import size, told_by
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.runs.folder import UNFINISHED

if TYPE_CHECKING:
    from sinkscope.runs.forecast import Forecast


P = ParamSpec("P")
R = TypeVar("R")

BAD_INPUT = 2
LONGEST_LINE = 1000
"""Most characters of a line on stderr: names and values from outside may have any length."""


def guarded(command: Callable[P, R], spreads: bool = False) -> Callable[P, R]:
    """Wraps a command so that an error becomes one line on stderr and exit code 2; 1 is kept for a failed check.

    `spreads`: the command can share its work with the other processes of a launch. Any other refuses to run in one.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if size() > 1 and not spreads:
                raise SinkscopeError(
                    f"only scan, ablate, arms, evict and quant run in several processes ({told_by()}): start this "
                    "command without a launcher, or unset these variables"
                )
            return command(*args, **kwargs)
        except typer.Exit:  # the command's own exit code; typer derives it from RuntimeError
            raise
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(exit_code()) from None
        except BrokenPipeError:
            discard_stdout()
            raise typer.Exit(0) from None
        except SystemExit as stop:
            fail(
                f"code that is not sinkscope's ended the program (exit code {stop.code}): a model's own, or that of a "
                "metric"
            )
        except Exception as error:
            fail(in_one_line(error))
        raise AssertionError

    return run


def interrupted(
    stopped: KeyboardInterrupt, folder: Path, kept: str = UNFINISHED, what: str = "what is measured is",
    how: str = "--resume",
) -> NoReturn:  # fmt: skip
    """Ends an interrupted command with its exit code, and says what the folder holds of it, and how it goes on; where
    `kept` is not in the folder, the interrupt goes on."""
    if not (folder / kept).exists():
        raise stopped
    say(f"interrupted: {str(stopped) or f'{what} kept in {folder}'}; {how} goes on")
    raise typer.Exit(exit_code()) from None


@contextmanager
def resumable(folder: Path, *told: str) -> Iterator[None]:
    """Ends the block as `interrupted` does after Ctrl-C or SIGTERM. `told`: what that takes after the folder."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        interrupted(stopped, folder, *told)


def encode_anything() -> None:
    """Makes stdout write what its encoding lacks (`±` in ASCII) as JSON's escapes, instead of failing at the end.

    Python's own `backslashreplace` would write `\\xb1`, which is no JSON.
    """

    def escaped(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("sinkscope", escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="sinkscope")


def discard_stdout() -> None:
    """Points stdout at the null device: once the reader of a pipe has gone, Python's own last flush would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def put(text: str) -> None:
    """Writes to stdout. Where its reader has gone (`| head`), the command goes on: its work decides the exit code."""
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        discard_stdout()


def open_closed_streams() -> None:
    """Opens the null device for each standard stream that the caller closed (`>&-`), so that writing to it is no error.

    Without it the next file that is opened would take the stream's number, and get what other code prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is the closed stream's
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8"))


def fail(message: str) -> None:
    """Prints the error and ends the command with the exit code of bad input."""
    say(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def say(message: str) -> None:
    """Prints one line to stderr, of at most LONGEST_LINE characters, with control characters made visible.

    A stderr that takes nothing, because its disk is full, its reader has gone or a program has closed it, ends no
    command.
    """
    from sinkscope.present.text import printable, shortened

    with suppress(OSError, ValueError):
        print(shortened(f"sinkscope: {printable(message)}", LONGEST_LINE), file=sys.stderr, flush=True)


def say_of(name: str, error: Exception) -> None:
    """Prints the error of one of several models, with its name where the error lacks it."""
    text = in_one_line(error)
    say(f"error: {text}" if re.search(rf"(^|\s){re.escape(name)}($|[\s:])", text) else f"error: {name}: {text}")


def warn_in_one_line() -> None:
    """Prints the warnings of other libraries as one line each, without the line of their source."""

    def shown(message: Warning | str, *_: object) -> None:
        say(f"warning: {message}")

    warnings.showwarning = shown  # type: ignore[assignment]


_SHOW_WARNING = warnings.showwarning


@contextmanager
def as_python_does() -> Iterator[None]:
    """Leaves stdout and warnings to a program that runs in this process, until the block ends."""
    shown = warnings.showwarning
    warnings.showwarning = _SHOW_WARNING
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="strict")
    try:
        yield
    finally:
        warnings.showwarning = shown
        with suppress(OSError, ValueError):  # its reader has gone, or the program closed it: the run is written still
            if sys.stdout is not None:
                sys.stdout.flush()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="sinkscope")


def check_writable(*asked: Path | None) -> None:
    """Raises SinkscopeError, before anything is measured, where a path is a folder, its folder does not exist, it is a
    file of a run, or two of them are one file, of which the second would replace the first."""
    from sinkscope.runs.run import is_of_run

    paths = [path for path in asked if path is not None]
    for number, path in enumerate(paths):
        if path.is_dir():
            raise SinkscopeError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise SinkscopeError(f"cannot write {path}: no folder {path.parent}")
        if is_of_run(Path(os.path.realpath(path))):
            raise SinkscopeError(f"cannot write {path}: it is a file of a run; give another")
        if _is_replaced(path) and os.path.realpath(path) in map(os.path.realpath, paths[:number]):
            raise SinkscopeError(f"cannot write {path}: two outputs would stand there; give each a file of its own")


def _is_replaced(path: Path) -> bool:
    """Whether writing to it replaces what is there, unlike a pipe or /dev/null."""
    return path.is_file() or not path.exists()


# `--dry-run` of `scan`, `arms`, `evict`, `quant` and `claims`: the option, and what it prints.


HELP = (
    "Say what would be read, and how much memory, how many passes and how much time it takes. Load and write nothing."
)
MACHINE = "With --dry-run: the machine whose time is estimated, here (measured), h100 or a100. [default: here]"


@dataclass(frozen=True)
class DryRun:
    """Each field is an option."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help=HELP, rich_help_panel=LOADED)] = False
    machine: Annotated[str | None, typer.Option(metavar="NAME", help=MACHINE, rich_help_panel=LOADED)] = None

    def check(self) -> None:
        """Raises SinkscopeError for a machine that is named where nothing is estimated."""
        if self.machine is not None and not self.dry_run:
            from sinkscope.errors import SinkscopeError

            raise SinkscopeError("--machine goes with --dry-run")


NO_DRY_RUN = DryRun()


def print_forecasts(forecasts: Sequence[Forecast], as_json: bool) -> None:
    """Prints the forecasts to stdout: as JSON one record, or a list of several."""
    if as_json:
        from sinkscope.runs.schema.base import to_json

        records = [forecast.as_dict() for forecast in forecasts]
        sys.stdout.write(to_json(records[0] if len(records) == 1 else records))
        return
    from sinkscope.present.terminal.forecast import render_forecast

    sys.stdout.write("\n".join(render_forecast(forecast) for forecast in forecasts))
