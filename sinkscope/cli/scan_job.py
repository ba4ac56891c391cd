"""One model scanned and saved, alone or by all processes of a launch: what `sinkscope scan` does for each."""

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
    """The processes that share the scan. Raises SinkscopeError."""
    from sinkscope.engine.launch import start_processes
    from sinkscope.engine.launcher import size
    from sinkscope.errors import SinkscopeError

    if tp and size() == 1:
        raise SinkscopeError("--tp needs several processes: torchrun --nproc-per-node N -m sinkscope scan ... --tp")
    if tp and device != "auto":
        raise SinkscopeError(
            "--tp gives each process a GPU of its own (or the CPU where there is none): leave --device"
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

    def scan(self, model: str, target: Path) -> tuple[Run, list[Path]]:
        """The run and its files. Raises SinkscopeError; after Ctrl-C saves what was done and exits 130."""
        from sinkscope.runs.run import check_target

        self.processes.on_main(lambda: check_target(target, self.force, self.resume))
        from sinkscope.engine.scan import Interrupted, scan
        from sinkscope.present.terminal.progress import progress_bar

        with progress_bar(self.quiet) as progress:
            try:
                run = scan(
                    model, shards=target, resume=self.resume, progress=progress, processes=self.processes,
                    **self.options,
                )  # fmt: skip
            except Interrupted as stopped:
                part = stopped.run
                if part is None:
                    raise
                self.processes.on_main(lambda: self._save_part(part, target))
                raise typer.Exit(INTERRUPTED) from None
        return run, self.processes.on_main(lambda: self._save(run, target))

    def finished_before(self, target: Path) -> Run | None:
        """The run that need not be made again with --resume."""
        return self.processes.on_main(lambda: self._finished(target))

    def _finished(self, target: Path) -> Run | None:
        from sinkscope.runs.folder import UNFINISHED
        from sinkscope.runs.run import finished, load_run

        skip = self.resume and finished(target) and not (target / UNFINISHED).exists()
        return load_run(target) if skip else None

    def _save(self, run: Run, target: Path) -> list[Path]:
        run.manifest.command = shlex.join(["sinkscope", *sys.argv[1:]])
        return run.save(target, force=self.force, formats=self.formats)

    def _save_part(self, run: Run, target: Path) -> None:
        from sinkscope.runs.run import finished

        if finished(target):  # --force meant to replace it by a whole run, not by a part
            target = target.with_name(f"{target.name}-interrupted")
        self._save(run, target)
        say(f"interrupted: what was done ({run.manifest.sequences_done} sequences) is in {target}; --resume goes on")
