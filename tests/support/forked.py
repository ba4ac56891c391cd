"""Runs sinkscope's commands in forks of one process, which has imported everything, and kills them.

Reads lines of JSON from stdin: [words, seconds after which the command is killed, or null]. Prints the exit code of
each, -9 for a killed one, and the seconds it took.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import torch  # noqa: F401
import transformers  # noqa: F401

import sinkscope.engine.scan
import sinkscope.present.terminal.progress
import sinkscope.runs.run  # noqa: F401
from sinkscope.cli import main


class Kills:
    """Commands in forks of one process, which is this file, some of them killed."""

    def __init__(self) -> None:
        words = [sys.executable, __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, *words: object, after: float | None = None) -> tuple[int, float]:
        """The exit code of a command, -9 where it was killed `after` that many seconds, and the seconds it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([[*map(str, words)], after]) + "\n")
        self._process.stdin.flush()
        code, seconds = self._process.stdout.readline().split()
        return int(code), float(seconds)

    def end(self) -> None:
        self._process.communicate(timeout=600)


for line in sys.stdin if __name__ == "__main__" else ():
    words, after = json.loads(line)
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
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
    sys.stdout.write(f"{code} {time.monotonic() - began:.3f}\n")
    sys.stdout.flush()
