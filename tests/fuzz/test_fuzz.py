"""Thousands of damaged inputs, each through the command line: whatever it is given, it keeps the contract.

SINKSCOPE_FUZZ_SEED=N draws other cases; SINKSCOPE_RANDOM_SHARE=0.1 takes a tenth of them. A case that failed is run
again, and its folder left, by `python tests/fuzz/worker.py WORLD SCRATCH KIND SEED NUMBER`; a WORLD that is not there
is made.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Tell
from contract import Case, Outcome, breaches, files_of
from kinds import KINDS
from random_share import share_of

SEED = os.environ.get("SINKSCOPE_FUZZ_SEED", "0")
BUSY, IDLE = 20.0, 240.0
"""A case hangs that has taken so many seconds of a core, or, waiting, of the clock: other work may hold the cores."""
START = 300.0
"""Seconds for the worker to begin: it imports torch, and the first one makes the world."""


class Worker:
    """A process that runs cases; killed and started anew where one hangs or ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).parent / "worker.py"), self.folder / "world", self.folder]
        # Thousands of cases under coverage's trace would take twice as long, and the other tests show what runs.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=variables | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START)[0], "the worker did not begin"
        assert process.stdout.readline() == "\n", "the worker did not begin"
        return process

    def tried(self, kind: str, number: int) -> dict[str, Any]:
        process = self._process = self._process or self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{kind} {SEED} {number}\n")
        process.stdin.flush()
        ready = self._answered(process)
        answer = process.stdout.readline() if ready else ""
        if answer:
            return json.loads(answer)
        what = f"the process ended with {process.wait()}" if ready else "it hangs"
        self.stop()
        return {"breaches": [what], "command": "", "code": "", "stderr": ""}

    def _answered(self, process: subprocess.Popen[str]) -> bool:
        """Whether the process answered, or ended, before it took too long."""
        watched, begun = psutil.Process(process.pid), time.monotonic()
        spent = sum(watched.cpu_times()[:2])
        while not select.select([process.stdout], [], [], 1.0)[0]:
            if sum(watched.cpu_times()[:2]) - spent > BUSY or time.monotonic() - begun > IDLE:
                return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_it_is_given(kind: str, worker: Worker, tell: Tell) -> None:
    count = share_of(KINDS[kind][0])
    begun = time.monotonic()
    broken = []
    for number in range(count):
        answer = worker.tried(kind, number)
        if answer["breaches"]:
            broken.append(f"{kind} {SEED} {number}: {'; '.join(answer['breaches'])}\n    {answer['command']}\n"
                          f"    exit code {answer['code']}: {answer['stderr'].strip()[:400]}")  # fmt: skip
    spent = time.monotonic() - begun
    tell(f"{kind}: {count} tried, {count - len(broken)} clean, seed {SEED}, {spent:.0f} s")
    # In ASCII: a case may have said what is no UTF-8, and a report that a process cannot send ends the whole run.
    listed = "\n".join(broken).encode("ascii", "backslashreplace").decode()
    assert not broken, f"{len(broken)} of {count} cases:\n{listed}"


# The contract itself


def judged(folder: Path, code: object, stderr: str = "", words: str = "scan", target: str | None = "run") -> list[str]:
    """What the contract says of a command that left the folder as it is."""
    return breaches(Case(words.split(), target), Outcome(code, "", stderr), folder, files_of(folder))


def test_the_contract_finds_what_breaks_it(tmp_path: Path) -> None:
    error = "sinkscope: error: no model"
    assert judged(tmp_path, 2, error) == []
    wrote = "sinkscope: warning: few\nsinkscope: warning: short\nsinkscope: wrote x\nsinkscope: next: sinkscope show x"
    assert judged(tmp_path, 0, wrote) == []
    assert judged(tmp_path, 2, f"{error}\nsinkscope: next: sinkscope show x") == ["2 lines on stderr"]
    left_out = "sinkscope: not drawn: a: no table\nsinkscope: not drawn: b: no table"
    assert judged(tmp_path, 0, left_out, "figures lampert a") == []
    assert judged(tmp_path, 2, left_out, "figures lampert a") == ["2 lines on stderr"]
    assert judged(tmp_path, 1, error, "check a") == []
    assert judged(tmp_path, 1, error) == ["exit code 1"]
    assert judged(tmp_path, 2) == ["exit code 2 without a word"]
    assert judged(tmp_path, 2, f"{error}\n{error}") == ["2 lines on stderr"]
    assert judged(tmp_path, 2, error * 100) == ["a line of 2600 characters on stderr"]
    assert judged(tmp_path, 2, "sinkscope: error: unexpected Own: 'x'") == ["unexpected Own: on stderr"]
    assert judged(tmp_path, 2, "sinkscope: error: no KeyError") == ["KeyError on stderr"]
    assert judged(tmp_path, 2, "\x1b[31mno") == ["a terminal code in a stream that is no terminal"]
    assert judged(tmp_path, 2, "::error::x") == ["a line that begins as a workflow command"]


def test_the_contract_finds_what_is_half_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "heads.csv").write_text("old")
    before = files_of(tmp_path)
    case, error = Case(["scan"], "run"), "sinkscope: error: no"
    assert breaches(case, Outcome(2, "", error), tmp_path, before) == []
    (tmp_path / "run" / "heads.csv").write_text("new")
    assert breaches(case, Outcome(2, "", error), tmp_path, before) == ["exit code 2, and changed: run/heads.csv"]
    assert breaches(case, Outcome(2, "", f"{error}: --resume"), tmp_path, before) != []
    full = Case(["scan"], "run", closed=("full",))
    assert breaches(full, Outcome(2, "", error), tmp_path, before) == [], "written, then not printed"
    (tmp_path / "run" / "heads.csv").write_text("old")
    (tmp_path / "left").write_text("")
    assert breaches(case, Outcome(0, "", ""), tmp_path, before) == ["changed: left"]
    (tmp_path / "left").unlink()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    assert "cannot be read" in breaches(case, Outcome(0, "", ""), tmp_path, before)[0]
