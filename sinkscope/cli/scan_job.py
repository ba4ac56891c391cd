"""Scans and saves one model of `sinkscope scan`, in one process or in all processes of a launch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sinkscope.cli.common import INTERRUPTED, say

if TYPE_CHECKING:
    from sinkscope.engine.launch import Processes
    from sinkscope.runs.run import Run


def launched(device: str, tp: bool) -> Processes:
    """Joins the processes that share the scan. Raises SinkscopeError where --tp does not fit the launch or --device."""
    from sinkscope.engine.launch import start_processes
    from sinkscope.engine.launcher import size
    from sinkscope.errors import SinkscopeError

    if tp and size() == 1:
        raise SinkscopeError("--tp needs several processes: torchrun --nproc-per-node N -m sinkscope scan ... --tp")
    if tp and device != "auto":
        raise SinkscopeError(
            "--tp gives each process a GPU of its own (or the CPU where there is none): leave out --device"
        )
    return start_processes(device, tp)


@dataclass(frozen=True)
class Job:
    """How each model is scanned and saved. `options`: keyword arguments of sinkscope.scan."""

    options: dict[str, Any]
    resume: bool
    force: bool
    formats: tuple[str, ...]
    quiet: bool
    processes: Processes
    what: str = ""
    """Which of several models or steps this is; it stands before the stages of the progress."""

    def scan(self, model: str, target: Path) -> tuple[Run, list[Path]]:
        """Scans a model; returns the run and the files written, no files where --resume finds the same scan finished.

        Raises SinkscopeError. After Ctrl-C, saves what was measured until then and exits with 130.
        """
        resume = self.processes.on_main(lambda: self._resumes(target))
        from sinkscope.checkpoints.names import check_model

        known = {name: self.options[name] for name in ("revision", "allow_pickle") if name in self.options}
        self.processes.on_main(lambda: check_model(model, **known))
        from sinkscope.engine.scan import Interrupted, scan
        from sinkscope.present.terminal.progress import progress_bar

        with progress_bar(self.quiet, self.what) as progress:
            try:
                run = scan(
                    model, shards=target, resume=resume, progress=progress, processes=self.processes,
                    **self.options,
                )  # fmt: skip
            except Interrupted as stopped:
                part = stopped.run
                if part is None:
                    raise
                self.processes.on_main(lambda: self._save_part(part, target))
                raise typer.Exit(INTERRUPTED) from None
        if run.path is not None:
            say(f"{model}: already finished, in {target}")
            return run, []
        return run, self.processes.on_main(lambda: self._save(run, target))

    def _resumes(self, target: Path) -> bool:
        """Whether the scan resumes from what the folder holds. Raises SinkscopeError where it must not be put there.

        A finished run is resumed too: nothing is left to scan. With --force it is replaced.
        """
        from sinkscope.runs.folder import UNFINISHED
        from sinkscope.runs.run import check_target, finished

        done = finished(target) and not (target / UNFINISHED).exists()
        if self.force or not (done and self.resume):
            check_target(target, self.force, self.resume)
        return self.resume and not (done and self.force)

    def _save(self, run: Run, target: Path) -> list[Path]:
        run.manifest.command = shlex.join(["sinkscope", *sys.argv[1:]])
        return run.save(target, force=self.force, formats=self.formats)

    def _save_part(self, run: Run, target: Path) -> None:
        from sinkscope.runs.run import finished

        if finished(target):  # --force was meant for a whole run in its place, not for a part of one
            target = target.with_name(f"{target.name}-interrupted")
        self._save(run, target)
        say(
            f"interrupted: {run.manifest.sequences_done} sequences are measured and saved in {target}; --resume goes on"
        )
