"""Commands started by a launcher in several processes, and ended with all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"),
)

LIMIT = 120
"""Seconds after which a launch counts as hung."""


def start_launch(*words: object, launcher: tuple[str, ...] = TORCHRUN, count: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, str(count), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def launch(*words: object, limit: float = LIMIT, **kwargs: Any) -> tuple[int, str, str]:
    """Exit code of the launcher, stdout, stderr. `limit`: seconds after which it counts as hung."""
    process = start_launch(*words, **kwargs)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_all(process)
        process.communicate()  # closes its pipes, which the next test would be blamed for
        raise
    finally:
        kill_all(process)
    return process.returncode, out, err


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of a launcher and every process it has started."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)
