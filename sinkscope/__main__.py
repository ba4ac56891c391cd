"""`python -m sinkscope` is the `sinkscope` command."""

from __future__ import annotations

import signal
import sys


def command() -> None:
    """The `sinkscope` command, in a process of its own. Ctrl-C and SIGTERM while it begins end it as later on: in one
    line, with exit code 130 or 143."""
    try:
        from sinkscope.cli import main, signals

        signals.end_at_once()
        signals.listen()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the end, with a traceback
        sys.stderr.write("sinkscope: interrupted\n")
        sys.exit(130)
    try:
        main()
    except KeyboardInterrupt:
        code = signals.exit_code()
        signals.end_at_the_next(code)
        sys.stderr.write("sinkscope: interrupted\n")
        sys.exit(code)


if __name__ == "__main__":
    command()
