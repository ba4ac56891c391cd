"""`python -m sinkscope` is the `sinkscope` command."""

from __future__ import annotations

import sys


def command() -> None:
    """The `sinkscope` command, in a process of its own. Ctrl-C while it begins ends it as later on: in one line, with
    exit code 130."""
    try:
        from sinkscope.cli import main
        from sinkscope.cli.ending import end_at_once

        end_at_once()
        main()
    except KeyboardInterrupt:
        sys.stderr.write("sinkscope: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    command()
