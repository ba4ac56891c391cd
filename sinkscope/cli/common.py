"""What all commands share: one line for an error and the right exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from sinkscope.engine.launcher import size
from sinkscope.errors import SinkscopeError, in_one_line

P = ParamSpec("P")
R = TypeVar("R")

BAD_INPUT, INTERRUPTED = 2, 130


def guarded(command: Callable[P, R], spreads: bool = False) -> Callable[P, R]:
    """Turns what a command raises into one line on stderr: exit 2, never 1, which means a failed check.

    `spreads`: the command knows how to share its work with the other processes of a launch; the others refuse it.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if size() > 1 and not spreads:
                raise SinkscopeError("only `scan` runs in several processes: start this command without a launcher")
            return command(*args, **kwargs)
        except typer.Exit:  # the command's own exit code; typer derives it from RuntimeError
            raise
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            discard_stdout()
            raise typer.Exit(0) from None
        except Exception as error:
            fail(in_one_line(error))
        raise AssertionError

    return run


def discard_stdout() -> None:
    """After the reader of a pipe has gone: Python's own last flush must not fail loudly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> None:
    say(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def say(message: str) -> None:
    """One line on stderr, control characters made visible."""
    from sinkscope.present.text import printable

    print(f"sinkscope: {printable(message)}", file=sys.stderr)
