"""What `arms`, `evict` and `quant` share: their options, the measurement, and what is written and printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli.common import INTERRUPTED, say

if TYPE_CHECKING:
    from sinkscope.experiments.arms.result import Arms

Model = Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or example:NAME.", metavar="MODEL")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", help="Run folder of this model, which arms may ask; its text is left out.", metavar="RUN"),
]
Data = Annotated[str, typer.Option(metavar="SPEC", help="Text to measure the loss on, without what the run read.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per sequence. [default: the run's, or 256]")]
NumSequences = Annotated[int, typer.Option(help="Sequences; every arm is measured on the same ones.")]
Draws = Annotated[int, typer.Option(help="Draws of every random arm, the control.")]
Seed = Annotated[int, typer.Option(help="Seed that draws the documents and the random arms.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished measurement in --out.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a finished measurement.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print arms.json alone to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, warnings or table.")]


@dataclass(frozen=True)
class ArmsJob:
    """Where the results go, and what is printed."""

    target: Path
    resume: bool
    force: bool
    as_json: bool
    quiet: bool

    def measure(
        self,
        model: str,
        arms: Iterable[str],
        options: dict[str, Any],
        draw: Callable[[Arms], dict[str, bytes]],
        render: Callable[[Arms, Iterable[Path]], str],
    ) -> None:
        """Measures the arms, writes the folder and prints the result."""
        from sinkscope.experiments.arms.result import ARMS_FOLDER

        ARMS_FOLDER.check(self.target, self.force, self.resume)
        from sinkscope.experiments.arms.experiment import arms as measure
        from sinkscope.present.figures.canvas import available
        from sinkscope.present.terminal.progress import progress_bar

        with progress_bar(self.quiet) as progress, resumable():
            result = measure(
                model, list(dict.fromkeys(arms)), shards=self.target, resume=self.resume, progress=progress, **options
            )
        if not available():
            say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
        written = result.save(self.target, self.force, draw if available() else None, resume=True)
        if not self.quiet:
            for warning in result.warnings:
                say(f"warning: {warning}")
        if self.as_json:
            from sinkscope.runs.strict_json import to_json

            sys.stdout.write(to_json(result.as_dict()))
        elif not self.quiet:
            sys.stdout.write(render(result, written))


@contextmanager
def resumable() -> Iterator[None]:
    """Around a measurement: after Ctrl-C, says what is kept and ends with exit code 130."""
    from sinkscope.experiments.arms.finished import Interrupted

    try:
        yield
    except Interrupted as stopped:
        say(f"interrupted: {stopped}; --resume goes on")
        raise typer.Exit(INTERRUPTED) from None


def numbers(text: str, option: str, least: int = 0) -> list[int]:
    """Reads whole numbers such as `0,1,4`, in rising order, each once. Raises SinkscopeError for any other text."""
    from sinkscope.errors import SinkscopeError

    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        raise SinkscopeError(f"--{option} {text!r}: whole numbers from {least} on are needed, e.g. 0,1,4")
    return sorted({int(part) for part in parts})
