"""Long work on stderr: what it is doing, how far it is, how fast, and the time left.

A terminal shows a bar. A file or a pipe gets a line at each tenth, where the work takes long, and at least one a
minute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sinkscope.present.numbers import UNITS
from sinkscope.present.text import printable

if TYPE_CHECKING:
    from rich.console import Console

COUNTED = ("scanning", "ablating")
"""The stages that count sequences."""
BYTES = ("converting", "downloading", "dequantizing")
"""The stages that count bytes."""
STAGES = {
    "converting": "converting the checkpoint into {cache}, once",
    "downloading": "downloading the model",
    "dequantizing": "dequantising the weights",
    "loading": "loading the model",
    "compiling": "compiling the loops, once after an installation",
    "checking": "self-check against eager",
    "scanning": "scanning",
    "ablating": "measuring",
    "timing": "timing, pass",
    "memory": "measuring peak memory, contender",
}
MINUTE, APART = 60.0, 10.0
"""Seconds after which a line is due off a terminal, and between two lines at least."""
BAR = 20
"""Width of the bar in characters. A bar as wide as the terminal shares its room with the words, and cuts them."""

Progress = Callable[[str, int, int], None]
Begin = Callable[[str, int], None]
"""Called with (name of the model, largest number of steps) when a training starts."""
Steps = Callable[[int, float, float, float], None]
"""Called with (steps done, loss, largest absolute error, BOS mass) from time to time."""


@dataclass
class Pace:
    """One stage of the work: how much is done of how much, since when. Seconds are those of `clock`.

    The time left is the mean pace since the stage began, from what was done then: a resumed scan begins in the middle.
    """

    clock: Callable[[], float] = time.monotonic
    stage: str = ""
    words: str = ""
    total: int = 0
    done: int = 0
    note: str = ""
    began: float = 0.0
    told: float = 0.0
    first: int = 0
    step: int = 0
    draw: Callable[[], None] = lambda: None
    """Shows a new stage at once; a terminal is drawn anew ten times a second anyway."""

    def begin(self, stage: str, words: str, done: int, total: int) -> None:
        """Begins a stage, of which `done` of `total` steps are done already."""
        self.stage, self.words, self.total, self.done, self.first, self.note = stage, words, total, done, done, ""
        self.began = self.told = self.clock()
        self.draw()

    def go_on(self, done: int, note: str = "") -> None:
        """Says how many steps of the stage are done."""
        self.step = done - self.done
        self.done, self.told, self.note = done, self.clock(), note
        if done == self.total:
            self.draw()

    def rate(self) -> float | None:
        """Units a second; None before the first."""
        spent = self.told - self.began
        return (self.done - self.first) / spent if self.done > self.first and spent > 0 else None

    def left(self) -> float | None:
        """Seconds left at this moment; None where they are not known. A batch that takes longer than those before
        it takes no time from those after it."""
        rate = self.rate()
        if not self.total or rate is None:
            return None
        left = (self.total - self.done) / rate - (self.clock() - self.told)
        return max(left, (self.total - self.done - self.step) / rate, 0.0)

    def count(self) -> str:
        """`12/32`, in bytes where the stage counts them; empty where the total is not known."""
        if not self.total:
            return ""
        if self.stage in BYTES:
            return f"{self.done / UNITS['GiB']:.2f}/{self.total / UNITS['GiB']:.2f} GiB"
        return f"{self.done}/{self.total}"

    def state(self) -> str:
        """Count, speed, and time left, or the time spent where that is not known; a note last, where a narrow terminal
        cuts."""
        if not self.stage:
            return ""
        rate, left = self.rate(), self.left()
        speed = _speed(rate) if rate and self.stage in COUNTED else ""
        time_left = f"{duration(self.clock() - self.began)} so far" if left is None else f"{duration(left)} left"
        if self.total and self.done == self.total and self.clock() - self.told >= APART:
            time_left = "finishing"  # all is counted, and work that has no count goes on
        return "  ".join(filter(None, (self.count(), speed, time_left, self.note)))


def _speed(rate: float) -> str:
    """`2.5 seq/s`; below one sequence a second `12.0 s/seq`, which keeps its digits."""
    return f"{rate:.1f} seq/s" if rate >= 1 else f"{1 / rate:.1f} s/seq"


def duration(seconds: float) -> str:
    """`0:05`, `12:34`, `3:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextmanager
def progress_bar(quiet: bool, what: str = "") -> Iterator[Progress]:
    """Yields the callback (stage, done, total) that long work reports to; total 0 = not known.

    Shows nothing when quiet. `what` stands before each stage: which of several models or steps this is.
    """
    with _shown(quiet) as pace:

        def report(stage: str, done: int, total: int) -> None:
            if pace is None:
                return
            if stage != pace.stage or total != pace.total or done < pace.done:
                pace.begin(stage, _words(stage, what), done, total)
            else:
                pace.go_on(done)

        yield report


@contextmanager
def training_bar(quiet: bool) -> Iterator[tuple[Begin, Steps]]:
    """Yields what begins a training and what reports its steps, with loss, error and BOS mass. The time left is that to
    the largest number of steps: a task that is solved ends before."""
    with _shown(quiet) as pace:

        def begin(what: str, total: int) -> None:
            if pace is not None:
                pace.begin("training", what, 0, total)

        def report(step: int, loss: float, error: float, bos: float) -> None:
            if pace is not None:
                pace.go_on(step, f"loss {loss:.1e}  largest error {error:.4f}  BOS mass {bos:.3f}")

        yield begin, report


def _words(stage: str, what: str) -> str:
    from sinkscope.checkpoints.weight_files import cache_folder

    words = STAGES[stage].format(cache=printable(str(cache_folder())))
    return f"{printable(what)}: {words}" if what else words


@contextmanager
def _shown(quiet: bool) -> Iterator[Pace | None]:
    """A pace that is shown while the block runs: as a bar, or as lines; None when quiet."""
    from rich.console import Console

    console = Console(file=sys.stderr)  # this very stream: loading a model may point sys.stderr elsewhere for a while
    pace = Pace()
    if quiet:
        yield None
    elif console.is_terminal and sys.stderr.isatty():  # rich also takes a file for a terminal under FORCE_COLOR
        with _bar(console, pace):
            yield pace
    else:
        lines = Lines(pace)
        with lines.printed():
            yield pace


@contextmanager
def _bar(console: Console, pace: Pace) -> Iterator[None]:
    from rich.progress import BarColumn, ProgressColumn, Task
    from rich.progress import Progress as Live
    from rich.table import Column
    from rich.text import Text

    class Words(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(pace.words, no_wrap=True, overflow="ellipsis")

    class State(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(pace.state())

    class Bar(BarColumn):
        def render(self, task: Task) -> Any:
            task.total, task.completed = pace.total or None, pace.done
            return super().render(task) if pace.stage else Text()

    line = [Words(Column()), Bar(bar_width=BAR), State(Column(no_wrap=True))]  # a narrow terminal cuts the words first
    with Live(*line, console=console, transient=True) as live:
        live.add_task("")
        pace.draw = live.refresh
        try:
            yield
        finally:
            live.refresh()


@dataclass
class Lines:
    """Progress where there is no terminal: CI, sbatch, tee. Short work prints nothing."""

    pace: Pace
    stream: Any = field(default_factory=lambda: sys.stderr)
    said: float = field(init=False)
    tenth: tuple[str, int] = ("", 0)

    def __post_init__(self) -> None:
        self.said = self.pace.clock()

    def look(self) -> None:
        """Prints a line where one is due."""
        pace, now = self.pace, self.pace.clock()
        tenth = (pace.words, 10 * pace.done // pace.total if pace.total else 0)
        new = tenth != self.tenth and now - self.said >= APART
        if pace.words and (new or now - self.said >= MINUTE):
            self.said, self.tenth = now, tenth
            with suppress(OSError, ValueError):  # a full disk or a closed stream ends no scan
                print(f"sinkscope: {pace.words}: {pace.state()}", file=self.stream, flush=True)

    @contextmanager
    def printed(self) -> Iterator[None]:
        """Looks once a second while the block runs, in a thread: a single pass may take minutes."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                self.look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
