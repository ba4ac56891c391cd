"""The live progress bar on stderr: stage, sequences done, sequences a second, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

STAGES = {"loading": "loading the model", "checking": "self-check against eager", "scanning": "scanning"}


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback that `scan` reports to. Nothing is drawn when quiet or when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
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
            rate = f"{speed:.1f} seq/s" if speed and stage == "scanning" else ""
            if stage == "scanning" and done == 0:
                progress.reset(task, total=total)
            progress.update(
                task, description=STAGES[stage], completed=done, total=total or None, rate=rate, refresh=True
            )

        yield report
