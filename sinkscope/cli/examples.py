"""`sinkscope examples`: lists the checkpoints that need no model hub, and finds the folder of one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def examples(
    name: Annotated[
        str | None, typer.Argument(help="Example whose folder to print, for programs of your own.", show_default=False)
    ] = None,
) -> None:
    """List the example checkpoints, which come with sinkscope or as Python packages, and whether they are installed.

    With a name, print the folder of that checkpoint, and convert it first if need be: any program can load it.

    Example: sinkscope examples
    """
    from sinkscope.checkpoints.examples import EXAMPLES
    from sinkscope.present.terminal.metrics import render_examples

    sys.stdout.write(f"{_folder(name)}\n" if name else render_examples(EXAMPLES.values()))


def _folder(name: str) -> str:
    """The folder of an example, with or without `example:` before its name. Raises SinkscopeError for an unknown name
    or an absent package."""
    from sinkscope.checkpoints.examples import example_folder
    from sinkscope.present.terminal.progress import progress_bar

    with progress_bar(quiet=False) as report:
        return str(example_folder(name.removeprefix("example:"), report))
