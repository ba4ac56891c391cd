"""Scans and saves one model of `sinkscope scan`, in one process or in all processes of a launch."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sinkscope.cli.common import interrupted, say
from sinkscope.cli.libraries import import_libraries
from sinkscope.cli.signals import exit_code
from sinkscope.runs import whole
from sinkscope.runs.folder import KEY, UNFINISHED, taken, unfinished_in
from sinkscope.runs.whole import read_file

if TYPE_CHECKING:
    from sinkscope.engine.launch import Processes
    from sinkscope.runs.request import Request
    from sinkscope.runs.run import Run


@dataclass(frozen=True)
class ScanJob:
    """How each model is scanned and saved. `request`: what is asked of each. `metrics`: files of the user's own."""

    request: Request
    metrics: Sequence[str | Path]
    resume: bool
    force: bool
    formats: tuple[str, ...]
    quiet: bool
    processes: Processes
    strict: bool = False
    what: str = ""
    """Which of several models or steps this is; it stands before the stages of the progress."""
    again: str = "--resume"
    """What goes on with an interrupted scan."""

    def check_device(self) -> None:
        """Raises SinkscopeError where the device is not here: of several models, before the first, for it fits none."""
        import_libraries()
        from sinkscope.checkpoints.loading import pick_device

        pick_device(self.request.device)

    def scan(self, model: str, target: Path) -> tuple[Run, list[Path]]:
        """Scans a model; returns the run and the files written, no files where --resume finds the same scan finished.

        Raises SinkscopeError. After Ctrl-C or SIGTERM, saves what was measured until then and exits with 130 or 143.
        """
        try:
            return self._scan(model, target)
        except KeyboardInterrupt as stopped:
            interrupted(stopped, target, how=self.again)

    def _scan(self, model: str, target: Path) -> tuple[Run, list[Path]]:
        with ExitStack() as held:
            resume = self.processes.on_main(partial(self._begin, model, target, held))
            import_libraries()
            from sinkscope.engine.scan import Interrupted, scan_request
            from sinkscope.present.terminal.progress import progress_bar

            with progress_bar(self.quiet, self.what) as progress:
                try:
                    run = scan_request(
                        self.request.model_copy(update={"model": model}),
                        metrics=self.metrics, shards=target, resume=resume,
                        progress=progress, processes=self.processes, strict=self.strict,
                    )  # fmt: skip
                except Interrupted as stopped:
                    if stopped.run is None:
                        raise KeyboardInterrupt from None
                    run = stopped.run
        if not run.manifest.complete:
            self.processes.on_main(partial(self._save_part, run, target))
            raise typer.Exit(exit_code())
        if run.path is not None:
            say(f"{model}: already finished, in {target}")
            return run, []
        return run, self.processes.on_main(partial(self._save, run, target))

    def _begin(self, model: str, target: Path, held: ExitStack) -> bool:
        """Refuses a folder and a name of a model that no scan can use, before torch is imported, and takes the folder
        until `held` is closed; returns whether the scan resumes."""
        from sinkscope.checkpoints.sources import check_model

        done, resumes = self._resumes(target)
        check_model(model, self.request.revision, self.request.allow_pickle)
        if not (done and resumes):  # a finished run may be all that is asked for
            held.enter_context(taken(target))
        return resumes

    def _resumes(self, target: Path) -> tuple[bool, bool]:
        """Whether the folder holds a finished run, and whether the scan resumes from what is there. Raises
        SinkscopeError where it must not be put there.

        A finished run is resumed too: nothing is left to scan. With --force it is replaced.
        """
        from sinkscope.runs.run import check_target, finished

        done = finished(target) and not unfinished_in(target)
        if self.force or not (done and self.resume):
            check_target(target, self.force, self.resume)
        resumes = self.resume and not (done and self.force)
        if resumes:
            self._refuse_another_text(target)
        return done, resumes

    def _refuse_another_text(self, target: Path) -> None:
        """Raises SinkscopeError, before the model is loaded, where the unfinished scan there was asked to read other
        text: what the command line gave decides it. The model's own defaults are compared after loading."""
        from sinkscope.errors import SinkscopeError

        settings = {name: value for name, value in self.request.part("text").items() if value is not None}
        unfinished = _settings(target / UNFINISHED / KEY, settings) or {}
        for name, value in unfinished.items():
            if value is not None and value != settings[name]:
                raise SinkscopeError(
                    f"{target} holds an unfinished scan with another --{name.replace('_', '-')} ({value} there, "
                    f"{settings[name]} now); give another --out, or --force to start anew"
                )

    def _save(self, run: Run, target: Path) -> list[Path]:
        run.manifest.command = shlex.join(["sinkscope", *sys.argv[1:]])
        return run.save(target, force=self.force, formats=self.formats)

    def _save_part(self, run: Run, target: Path) -> None:
        from sinkscope.runs.run import finished

        if finished(target):  # --force was meant for a whole run in its place, not for a part of one
            target = target.with_name(f"{target.name}-interrupted")
        self._save(run, target)
        done = run.manifest.sequences_done
        say(f"interrupted: {done} sequences are measured and saved in {target}; {self.again} goes on")


SETTINGS: tuple[Any, ...] = ("text", "columns", "rounding")
"""The parts of a request that an unfinished scan and the one that goes on with it must share."""


def free_folder(base: Path) -> Path:
    """`base`, or the first of base-2, base-3, ... that is not there or is empty."""
    return next(path for path in _numbered(base) if (not path.is_dir() and not path.exists()) or _empty(path))


def unfinished_folder(base: Path) -> Path:
    """The last of base, base-2, ... that holds what an interrupted measurement has kept; else a free folder."""
    there = list(itertools.takewhile(lambda path: path.exists() and not _empty(path), _numbered(base)))
    return next((path for path in reversed(there) if (path / UNFINISHED).is_dir()), None) or free_folder(base)


def run_folder(base: Path, settings: dict[str, Any], resume: bool, force: bool) -> Path:
    """The run folder of a scan with these settings (`Request.part` of SETTINGS).

    With `force` it is `base`, whose run is replaced. With `resume` it is the last folder that holds an unfinished scan
    of the same settings, else one with a finished scan of the same. Where there is none, it is the last unfinished one:
    the scan is then refused with what differs. In all other cases it is a free folder.
    """
    if force:
        return base
    there = list(itertools.takewhile(lambda path: path.exists() and not _empty(path), _numbered(base)))[::-1]
    unfinished = [path for path in there if (path / UNFINISHED).is_dir()]
    if resume:
        same = [path for path in unfinished if _settings(path / UNFINISHED / KEY) == settings]
        finished = [path for path in there if path not in unfinished]
        done = [path for path in finished if _settings(path / "manifest.json", settings) == settings]
        if same or done or unfinished:
            return [*same, *done, *unfinished][0]
    return free_folder(base)


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")


def _empty(path: Path) -> bool:
    """Whether the folder holds nothing, or what a process left there that was killed before it measured anything."""
    if not path.is_dir():
        return False
    names = [inner.name for inner in path.iterdir()]
    return not names or (names == [UNFINISHED] and not unfinished_in(path) and not whole.is_locked(path / UNFINISHED))


def _settings(path: Path, names: dict[str, Any] | None = None) -> Any:
    """The settings of the request in a JSON file, those called `names`; None where it holds none."""
    try:
        request = json.loads(read_file(path))["request"]
        return request if names is None else {name: request[name] for name in names}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
