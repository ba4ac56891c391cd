"""The command line: one thin file per command.

Data goes to stdout, everything else to stderr. Exit codes: 0, 1 (failed check), 2 (bad input), 130 (Ctrl-C), 143
(SIGTERM).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer

from sinkscope.cli.common import (
    BAD_INPUT,
    discard_stdout,
    encode_anything,
    guarded,
    open_closed_streams,
    say,
    warn_in_one_line,
)
from sinkscope.cli.help import Command, Group
from sinkscope.cli.signals import INTERRUPTED, end, exit_code
from sinkscope.engine.launch import leave
from sinkscope.engine.launcher import hush
from sinkscope.errors import SinkscopeError, is_text

COMMANDS = (
    "scan", "watch", "track", "ablate", "arms", "evict", "quant", "show", "compare", "baseline", "check", "export",
    "plot", "figures", "report", "atlas", "card", "claims", "bench", "metrics", "schema", "examples", "trigger",
)  # fmt: skip
"""The commands in the order of `--help`. Each has a module of its name, with a function of its name."""

GROUPS = ("figures", "trigger")
"""The commands that have commands of their own: `app` of their module."""

STARTERS = ("watch",)
"""The commands that start a program: what stands behind its name is the program's."""

SPREAD = ("scan", "ablate", "arms", "evict", "quant")
"""The commands that share their work with the other processes of a launch."""


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="sinkscope",
        cls=Group,
        help="Measure attention sinks, dormant heads and massive activations in pretrained transformers.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(root)
    for name in names:
        module = import_module(f"sinkscope.cli.{name}")
        if name in GROUPS:
            made.add_typer(module.app, name=name)
        else:
            settings = {"allow_interspersed_args": name not in STARTERS}
            command = made.command(name, cls=Command, context_settings=settings)
            command(guarded(getattr(module, name), spreads=name in SPREAD))
    return made


def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Measure attention sinks, dormant heads and massive activations in pretrained transformers.

    Example: sinkscope scan example:gemma-3-270m
    """
    if version:
        from sinkscope.runs.defaults import VERSION

        sys.stdout.write(f"{VERSION}\n")
        raise typer.Exit


@functools.cache
def __getattr__(name: str) -> Any:
    """`app`, the whole command line, is made when it is asked for: a call of one command needs no other."""
    if name == "app":
        return application()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Entry point of the `sinkscope` command.

    It flushes stdout itself, because a flush that fails while Python exits would end with code 120.
    """
    open_closed_streams()
    try:
        hush()
    except SinkscopeError as error:
        say(f"error: {error}")
        sys.exit(BAD_INPUT)
    encode_anything()
    warn_in_one_line()
    code: str | int | None = 0
    stdout = sys.stdout
    try:
        try:
            _check_words(sys.argv[1:])
            application(_called(sys.argv[1:]))()
        except SinkscopeError as error:  # while the options are put together, as of a package that does not load
            say(f"error: {error}")
            code = BAD_INPUT
        except SystemExit as stop:
            code = exit_code() if stop.code == INTERRUPTED else stop.code
            if sys.stdout is not stdout:  # typer met a pipe without a reader, replaced stdout and ended with 1
                sys.stdout, code = stdout, 0
        if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has gone; the exit code stays
        discard_stdout()
    except OSError as error:  # such as a full disk; exit code 1 is kept for a failed check
        say(f"error: {error.strerror or error}")
        discard_stdout()
        code = BAD_INPUT
    end(leave(code if isinstance(code, int) else int(code is not None)))


def _check_words(words: list[str]) -> None:
    """Raises SinkscopeError for a word that is no text: no file of a run could hold it. `watch` passes on what stands
    behind --, whatever it is."""
    for word in words[: words.index("--") if "--" in words else None]:
        if not is_text(word):
            raise SinkscopeError(
                f"{word!r} is not UTF-8: rename the file or folder; where the name is right, set LC_ALL=C.UTF-8"
            )


def _called(words: list[str]) -> Iterable[str]:
    """The command that the words call; all of them where they name none, for help and for near names."""
    return words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS
