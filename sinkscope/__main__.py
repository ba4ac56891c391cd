"""`python -m sinkscope` is the `sinkscope` command."""

from __future__ import annotations

from sinkscope.cli import main
from sinkscope.cli.ending import end_at_once


def command() -> None:
    """The `sinkscope` command, in a process of its own."""
    end_at_once()
    main()


if __name__ == "__main__":
    command()
