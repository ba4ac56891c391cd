"""Runs sinkscope's commands in forks of one process, which has imported everything, and kills them.

Reads lines of JSON from stdin: [words, seconds after which the command is killed or null, a folder or "", the number of
the change of files below that folder before which the command is killed or null]. Prints the exit code of each, -9 for
a killed one, the seconds it took, and how many changes of files below the folder it began.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch  # noqa: F401
import transformers  # noqa: F401

import sinkscope.engine.scan
import sinkscope.present.terminal.progress
import sinkscope.runs.run  # noqa: F401
from sinkscope.cli import main

CHANGES = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")
"""Audit events of the interpreter that change files; of `open`, those that may write."""


class Kills:
    """Commands in forks of one process, which is this file, some of them killed.

    Attributes:
        changes: how many changes of files the last command began.
    """

    def __init__(self) -> None:
        self.changes = 0
        words = [sys.executable, __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self, *words: object, after: float | None = None, below: object = "", at: int | None = None
    ) -> tuple[int, float]:
        """The exit code of a command, -9 where it was killed, and the seconds it took.

        It is killed `after` that many seconds, or before it begins change number `at` of files `below` a folder.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([[*map(str, words)], after, str(below), at]) + "\n")
        self._process.stdin.flush()
        code, seconds, changes = self._process.stdout.readline().split()
        self.changes = int(changes)
        return int(code), float(seconds)

    def end(self) -> None:
        self._process.communicate(timeout=600)


def count_changes(below: str, at: int | None, count: mmap.mmap) -> None:
    """Counts from now on what this process changes below a folder, and kills it before number `at`."""

    def heard(event: str, given: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(given[0]).startswith(below):
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR):
            return
        number = int.from_bytes(count[:], "little") + 1
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        count[:] = number.to_bytes(len(count), "little")

    sys.addaudithook(heard)


for line in sys.stdin if __name__ == "__main__" else ():
    words, after, below, at = json.loads(line)
    shared = mmap.mmap(-1, 8)
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if below:
            count_changes(below, at, shared)
        sys.argv = ["sinkscope", *words]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            code = 70
        os._exit(code)
    timer = threading.Timer(after or 600, os.kill, (child, signal.SIGKILL))
    timer.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    sys.stdout.write(f"{code} {time.monotonic() - began:.3f} {int.from_bytes(shared[:], 'little')}\n")
    sys.stdout.flush()
