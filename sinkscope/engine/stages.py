"""The stages that a scan reports, with that of compiling loops in between."""

from __future__ import annotations

from sinkscope.engine.loop import Progress


class Stages:
    """Reports the stages of a scan. While the scan waits for loops to be compiled, that is the stage."""

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._last = ("loading", 0, 0)
        self._compiling = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._last, self._compiling = (stage, done, total), False
        self._report(stage, done, total)

    def compiling(self, waits: bool) -> None:
        """Reports that the scan waits for loops, or the stage before once it does no longer."""
        if waits != self._compiling:
            self._compiling = waits
            self._report(*(("compiling", 0, 0) if waits else self._last))
