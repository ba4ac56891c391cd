"""Runs sinkscope's commands in forks of one process, which has imported everything, and kills them.

Reads lines of JSON from stdin: [words, seconds after which the command is killed, or null]. Prints the exit code of
each, -9 for a killed one, and the seconds it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch  # noqa: F401
import transformers  # noqa: F401

import sinkscope.engine.scan
import sinkscope.present.terminal.progress
import sinkscope.runs.run  # noqa: F401
from sinkscope.cli import main

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
