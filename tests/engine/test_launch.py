"""What the processes of a launch tell each other, and how they end: two processes over gloo, without a scan."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sinkscope import SinkscopeError
from sinkscope.engine.launch import GONE, Launched

SCRIPT = Path(__file__).parents[1] / "support" / "steps.py"


@dataclass(frozen=True)
class Ended:
    """What each of two processes raised, step by step (empty where it wrote nothing), its exit code and its stderr."""

    raised: list[dict[str, str]]
    codes: list[int]
    stderr: list[str]


def started(part: str, folder: Path) -> Ended:
    """Two processes without a launcher's agent, which would end one of them as soon as the other has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, str(SCRIPT), part, str(folder)]
    running = []
    for rank in ("0", "1"):
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment = os.environ | place | launch
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    raised = [json.loads(file.read_text("utf-8")) if file.is_file() else {} for file in files]
    return Ended(raised, [process.returncode for process in running], said)


@pytest.mark.slow
@pytest.mark.enable_socket
def test_what_one_process_meets_all_raise(tmp_path: Path) -> None:
    ended = started("talk", tmp_path)
    main, other = ended.raised
    assert main.pop("left") == "SinkscopeError: process 1: ended with exit code 3"
    assert (main.pop("code"), other.pop("code")) == ("2", "3")
    assert main == other
    assert "--device-map spreads a model over the devices of one process" in main["map"]
    assert main["same"] == ""
    assert "process 1 reads other weights or text than process 0" in main["other"]
    assert main["ctrl-c"].startswith("KeyboardInterrupt")
    assert main["go on"] == "", "the second Ctrl-C does not end what the first one saves"
    assert ended.codes == [2, 2], "the first that is not 0"


@pytest.mark.slow
@pytest.mark.enable_socket
def test_with_spread_heads_a_failure_ends_its_process_alone(tmp_path: Path) -> None:
    """The other process is inside a layer and cannot be told: its part of the layer fails."""
    ended = started("heads", tmp_path)
    main, other = ended.raised
    assert "give the model's name" in main["object"]
    assert main["name"] == ""
    for each in ended.raised:
        assert each["pass"] == ""
        assert each["next step"].startswith("KeyboardInterrupt"), "Ctrl-C during a pass ends the step after it"
    assert other["failure"] == "RuntimeError: a layer failed\nand says much more"
    assert main["failure"] == f"SinkscopeError: {GONE}"
    assert ended.codes == [2, 2]
    told = [line for line in ended.stderr[1].splitlines() if line.startswith("sinkscope: ")]
    assert told == [
        "sinkscope: error: process 1: unexpected RuntimeError: a layer failed (SINKSCOPE_TRACEBACK=1 shows where)"
    ]


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.parametrize(("part", "raised"), [("death", {"death": f"SinkscopeError: {GONE}"}), ("last", {})])
def test_a_process_that_is_killed_ends_the_others(part: str, raised: dict[str, str], tmp_path: Path) -> None:
    """In a step, or after the last one: then nothing is raised, but the launch has failed."""
    ended = started(part, tmp_path)
    assert ended.raised == [raised, {}]
    assert ended.codes == [2, -signal.SIGKILL]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SinkscopeError, match="2 processes, but 1 GPUs here: start one per GPU, or give --device"):
        Launched("auto")
