"""What the processes of a launch say to each other, without a scan. Usage: steps.py PART FOLDER, in two processes.

Each process writes to FOLDER/<index>.json what its steps raised, by the step's name, and ends as a command does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sinkscope.engine.launch import Launched, leave, start_processes
from sinkscope.errors import SinkscopeError

PART, FOLDER = sys.argv[1], Path(sys.argv[2])
processes = start_processes("cpu", tensor=PART == "heads")
assert isinstance(processes, Launched)
MAIN = processes.index == 0
raised: dict[str, str] = {}


def attempt(name: str, step: Callable[[], Any]) -> None:
    try:
        step()
        raised[name] = ""
    except (SinkscopeError, KeyboardInterrupt, RuntimeError) as error:
        raised[name] = f"{type(error).__name__}: {error}"


def press_ctrl_c() -> None:
    if not MAIN:
        signal.raise_signal(signal.SIGINT)


def fail() -> None:
    """Fails in one process while the other waits for its part of a layer."""
    if not MAIN:
        raise RuntimeError("a layer failed\nand says much more")
    torch.distributed.all_reduce(torch.ones(1))


def die() -> None:
    if not MAIN:
        os.kill(os.getpid(), signal.SIGKILL)


if PART == "talk":
    attempt("map", lambda: processes.check("name", "auto"))
    attempt("same", lambda: processes.require_same("facts"))
    attempt("other", lambda: processes.require_same(processes.index))
    attempt("ctrl-c", lambda: processes.run(press_ctrl_c))
    press_ctrl_c()  # the launcher sends it again while the main process saves
    attempt("go on", lambda: processes.run(lambda: None))
    if MAIN:
        attempt("left", lambda: processes.run(lambda: None))
    raised["code"] = "2" if MAIN else "3"
elif PART == "heads":
    attempt("object", lambda: processes.check(object(), None))
    attempt("name", lambda: processes.check("name", None))
    attempt("pass", lambda: processes.run(press_ctrl_c))  # it may not end a layer that the others wait for
    attempt("next step", lambda: processes.run(lambda: None))
    attempt("failure", lambda: processes.run(fail))
elif PART == "death":
    attempt("death", lambda: processes.run(die))
else:
    die()  # it was done, and so the other one learns of it as it leaves
(FOLDER / f"{processes.index}.json").write_text(json.dumps(raised), "utf-8")
sys.exit(leave(int(raised.pop("code", 2 if any(raised.values()) else 0))))
