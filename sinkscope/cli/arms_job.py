"""What `ablate`, `arms`, `evict` and `quant` share: options, the measurement, and what is written and printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sinkscope.cli.common import NO_DRY_RUN, DryRun, print_forecasts, resumable, say
from sinkscope.cli.early import check_early
from sinkscope.cli.libraries import import_libraries
from sinkscope.cli.options import AllowPickle, Device, DeviceMap, Dtype, Revision, TrustRemoteCode, slug
from sinkscope.runs.folder import taken

if TYPE_CHECKING:
    from sinkscope.engine.launch import Processes
    from sinkscope.engine.loop import Progress
    from sinkscope.runs.folder import FolderKind
    from sinkscope.runs.saved.arms import Arms
    from sinkscope.runs.saved.result import Result

Model = Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or example:NAME.", metavar="MODEL")]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="Run folder of this model. Its T is the default, and its documents are left out.",
        metavar="RUN",
    ),
]
Data = Annotated[
    str,
    typer.Option(metavar="SPEC", help="Text on which the loss is measured, without documents that the run read."),
]
SeqLen = Annotated[
    int | None, typer.Option(help="Tokens per sequence. [default: the run's, or 256 if no --run is given]")
]
NumSequences = Annotated[int, typer.Option(help="Number of sequences, at least 2, the same for every intervention.")]
Draws = Annotated[int, typer.Option(help="Number of random draws of each control, 2 to 1,000.")]
Seed = Annotated[int, typer.Option(help="Seed that draws the documents and the random controls.")]
RESULTS = "Folder of the results."


@dataclass(frozen=True)
class TextLoss:
    """How these commands read text, load the model and draw. Each field is an option of all of them."""

    data: Data = "prose"
    seq_len: SeqLen = None
    num_sequences: NumSequences = 16
    draws: Draws = 5
    seed: Seed = 0
    device: Device = "auto"
    device_map: DeviceMap = None
    dtype: Dtype = "auto"
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False

    def settings(self) -> dict[str, Any]:
        """The options under the names that `sinkscope.arms` and `sinkscope.ablate` take."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class AblationLoss(TextLoss):
    """The same for `ablate`, which has no default beside its run's."""

    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence. [default: the run's]")] = None


@dataclass(frozen=True)
class ArmsLoss(TextLoss):
    """The same for all but `ablate`, with what is measured beside the loss."""

    cosines: Annotated[
        bool,
        typer.Option(
            "--cosines",
            help="Also measure how similar tokens are after each layer, under every intervention (arm_cosines.csv).",
        ),
    ] = False


@dataclass(frozen=True)
class GridLoss(ArmsLoss):
    """The same for a grid, which has a random arm in most cells."""

    draws: Draws = 2


@dataclass(frozen=True)
class Written:
    """What these commands write and print. Each field is an option of all of them."""

    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help=f"{RESULTS} [default: runs/MODEL-SLUG-COMMAND]"),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace a finished measurement.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON alone to stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, warnings or table.")] = False


R = TypeVar("R", bound="Result")


@dataclass(frozen=True)
class ArmsJob:
    """A measurement that may start: its folder can be written, and its options fit some model."""

    command: str
    model: str
    target: Path
    text: TextLoss
    written: Written
    processes: Processes
    dry: DryRun = NO_DRY_RUN

    def measure_arms(
        self, draw: Callable[[Arms], dict[str, bytes]], render: Callable[[Arms, list[Path]], str], **question: Any
    ) -> None:
        """`measure` of arms; with --dry-run what it would cost is printed in its place."""
        if self.dry.dry_run:
            from sinkscope.experiments.arms.forecast import dry_run_arms

            forecast = dry_run_arms(
                self.model, **question, **self.text.settings(), command=self.command, machine=self.dry.machine
            )
            self.processes.on_main(lambda: print_forecasts([forecast], self.written.as_json))
            return
        import_libraries()
        from sinkscope.experiments.arms.experiment import arms

        if self.processes.index == 0 and not (self.written.quiet or self.written.resume):
            self._foretell(**question)
        self.measure(arms, draw, render, **question)

    def _foretell(self, **question: Any) -> None:
        """Says about how long the passes take, before the model is loaded; nothing where it is less than a minute."""
        from sinkscope.experiments.arms.forecast import dry_run_arms
        from sinkscope.present.terminal.forecast import duration
        from sinkscope.present.terminal.progress import MINUTE

        try:
            time = dry_run_arms(self.model, **question, **self.text.settings(), command=self.command).time
        except Exception:  # only an estimate: what is wrong with the model or an arm, the measurement says
            return
        if time is not None and time.seconds >= MINUTE:
            say(
                f"{self.command}: about {duration(time.seconds)} on {time.machine}, without loading; it may be off by "
                f"a factor of {time.factor:g} (--dry-run says more)"
            )

    def measure(
        self,
        experiment: Callable[..., R],
        draw: Callable[[R], dict[str, bytes]],
        render: Callable[[R, list[Path]], str],
        **question: Any,
    ) -> None:
        """Runs the experiment in all processes with what is asked of it; the main one saves and prints the result.

        `draw` makes the figures, by file name.
        """
        with resumable(self.target):
            result, files = self._saved(experiment, draw, question)
        if not self.written.quiet:
            for warning in result.warnings:
                say(f"warning: {warning}")
        if self.written.as_json:
            from sinkscope.runs.schema.base import to_json

            sys.stdout.write(to_json(result.as_dict()))
        elif not self.written.quiet:
            sys.stdout.write(render(result, files))

    def _saved(
        self, experiment: Callable[..., R], draw: Callable[[R], dict[str, bytes]], question: dict[str, Any]
    ) -> tuple[R, list[Path]]:
        """What the experiment measured, and the files written of it."""
        from sinkscope.present.figures.canvas import available
        from sinkscope.present.terminal.progress import progress_bar

        with ExitStack() as held, progress_bar(self.written.quiet, self.command) as progress:
            self.processes.on_main(lambda: held.enter_context(taken(self.target)))
            result = experiment(
                self.model, **question, **self.text.settings(), shards=self.target, resume=self.written.resume,
                progress=progress if self.written.quiet else self._telling(progress), processes=self.processes,
            )  # fmt: skip
        if not available():
            say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
        figures = draw if available() else None
        files = self.processes.on_main(lambda: result.save(self.target, self.written.force, figures, resume=True))
        return result, files

    def _telling(self, progress: Progress) -> Progress:
        """The progress; before the first pass how many there are, and after it about how long all take, where that is a
        minute or more."""
        from sinkscope.present.terminal.progress import MINUTE, Pace

        pace, timed = Pace(), False

        def report(stage: str, done: int, total: int) -> None:
            nonlocal timed
            if stage == "ablating" and self.processes.index == 0:
                if pace.stage != stage:
                    pace.begin(stage, self.command, done, total)
                    say(f"{self.command}: {total - done} forward passes of one sequence each")
                pace.go_on(done)
                left = pace.left()
                if left is not None and not timed:
                    timed = True
                    if left >= MINUTE:
                        first = f"the first {done - pace.first} took {pace.told - pace.began:.1f} s"
                        minutes = f"{left / MINUTE:.0f}"
                        unit = "minute" if minutes == "1" else "minutes"
                        say(f"{self.command}: about {minutes} {unit} left: {first}")
            progress(stage, done, total)

        return report


def prepared(
    command: str, model: str, text: TextLoss, written: Written, kind: FolderKind | None = None,
    otherwise: Callable[[Path], Path] = lambda place: place, dry: DryRun = NO_DRY_RUN,
) -> ArmsJob:  # fmt: skip
    """Joins the processes of the launch and refuses, before the model is loaded, what is wrong for any model.

    `kind`: the kind of folder where it is none of arms. `otherwise`: chooses the folder where --out is not given, from
    the usual one, in the main process. `dry`: with --dry-run the folder is not looked at. Raises SinkscopeError.
    """
    from sinkscope.experiments.arms.text import Text, check_numbers

    check_numbers(Text(text.data, text.seq_len, text.num_sequences, text.seed), text.draws)
    from sinkscope.engine.launch import start_processes
    from sinkscope.runs.saved.arms import ARMS_FOLDER

    processes = start_processes(text.device)
    kind = kind or ARMS_FOLDER
    folder = processes.on_main(lambda: written.out or otherwise(Path("runs") / f"{slug(model)}-{command}"))
    dry.check()
    if not dry.dry_run:
        processes.on_main(lambda: kind.check(folder, written.force, written.resume))
    names = ("seq_len", "num_sequences", "seed", "dtype", "revision", "allow_pickle")
    settings = {name: getattr(text, name) for name in names}
    processes.run(lambda: check_early([model], not dry.dry_run, data=[text.data], **settings))
    return ArmsJob(command, model, folder, text, written, processes, dry)


def numbers(text: str, option: str, least: int = 0, example: str = "0,1,4", most: int | None = None) -> list[int]:
    """Reads whole numbers such as `0,1,4`, in rising order, each once. Raises SinkscopeError for any other text."""
    from sinkscope.errors import SinkscopeError

    parts = text.split(",")
    top = 10**9 - 1 if most is None else most
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and least <= int(part) <= top for part in parts):
        ends = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SinkscopeError(f"--{option} {text!r}: give whole numbers {ends}, such as {example}")
    return sorted({int(part) for part in parts})
