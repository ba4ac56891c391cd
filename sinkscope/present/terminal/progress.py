"""The live progress bar on stderr: stage, sequences done, sequences a second, time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

COUNTED = ("scanning", "ablating")
STAGES = {
    "loading": "loading the model",
    "checking": "self-check against eager",
    "scanning": "scanning",
    "ablating": "ablating",
    "timing": "timing, round",
}


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback that `scan` reports to. Nothing is drawn when quiet or when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not _draws(console):
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, rate="")

        def report(stage: str, done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            rate = f"{speed:.1f} seq/s" if speed and stage in COUNTED else ""
            if stage in COUNTED and done == 0:
                progress.reset(task, total=total)
            progress.update(
                task, description=STAGES[stage], completed=done, total=total or None, rate=rate, refresh=True
            )

        yield report


def _draws(console: Console) -> bool:
    """Whether a bar may be drawn: rich also takes a file for a terminal where FORCE_COLOR asks for colours."""
    return console.is_terminal and sys.stderr.isatty()


Begin = Callable[[str, int], None]
"""Called with (name of the model, largest number of steps) when a training starts."""

Steps = Callable[[int, float, float, float], None]
"""Called with (steps done, loss, largest absolute error, BOS mass) from time to time."""


@contextmanager
def training_bar(quiet: bool) -> Iterator[tuple[Begin, Steps]]:
    """A bar over training steps with live loss, error and BOS mass.

    Nothing is drawn when quiet or when stderr is no terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not _draws(console):
        yield lambda what, total: None, lambda *numbers: None
        return
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=None, state="")

        def begin(what: str, total: int) -> None:
            progress.reset(task, total=total, description=what, state="")

        def report(step: int, loss: float, error: float, bos: float) -> None:
            progress.update(
                task, completed=step, state=f"loss {loss:.1e}  largest error {error:.4f}  BOS mass {bos:.3f}"
            )

        yield begin, report
