"""SIGTERM, which a scheduler sends before it kills a job, ends a command as Ctrl-C does, with exit code 143."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Scan
from typer.testing import CliRunner

from sinkscope.cli import app, signals
from sinkscope.runs.run import load_run
from sinkscope.trigger import training

Patch = Callable[[Callable[[torch.Tensor], None]], None]


@pytest.fixture(autouse=True)
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process listens as the command's own does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(signals, "_terminated", False)
    monkeypatch.setattr(signals, "_process", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    signals.listen()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def terminate_at(call: int) -> Callable[[torch.Tensor], None]:
    """SIGTERM in the forward pass number `call`. The dry run and the self-check make the first four."""
    calls = iter(range(1, 1000))

    def before(ids: torch.Tensor) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)

    return before


SIX = ("--num-sequences", 6, "--batch-size", 2)


def test_a_scan_keeps_what_it_has_and_says_how_it_goes_on(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Patch
) -> None:
    patch_forward(terminate_at(7))
    outcome = scan_cli(tiny_folder, *SIX)
    out = outcome.folder
    told = f"sinkscope: interrupted: 4 sequences are measured and saved in {out}; --resume goes on\n"
    assert (outcome.code, outcome.stderr) == (143, told)
    assert load_run(out).manifest.sequences_done == 4
    assert [path.name for path in out.parent.iterdir()] == ["run"]
    assert not list((out / "shards").glob("*lock*"))
    assert scan_cli(tiny_folder, *SIX, "--resume").json("manifest")["complete"] is True


def test_a_scan_that_has_measured_nothing_leaves_nothing(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Patch
) -> None:
    patch_forward(terminate_at(2))
    outcome = scan_cli(tiny_folder, *SIX)
    assert (outcome.code, outcome.stderr) == (143, "sinkscope: interrupted\n")
    assert list(outcome.folder.parent.iterdir()) == []


def test_a_training_ends_its_step_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was drawn for a step is lost where the step does not end."""
    advance = training.Training.advance
    ended = []

    def advanced(self: training.Training) -> None:
        signal.raise_signal(signal.SIGTERM)
        advance(self)
        ended.append(self.step)

    out = tmp_path / "out"
    words = ["trigger", "train", "--length", "5", "--dim", "5", "--steps", "3", "--out", str(out), "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "advance", advanced)
        done = CliRunner().invoke(app, words)
    told = f"sinkscope: interrupted: the training is kept in {out}; --resume goes on\n"
    assert (done.exit_code, done.stderr) == (143, told)
    assert ended == [1]
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0


def test_where_ctrl_c_is_ignored_it_ends_the_command_all_the_same() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signals.exit_code() == 143


def test_a_copy_of_the_process_ends_at_once() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os.write(write, b"went on")
            os._exit(0)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert os.read(read, 10) == b""
    os.close(read)


def test_a_program_has_the_signal_for_itself() -> None:
    with signals.left_to_program():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with signals.left_to_program():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "what the program asked for stays"


ENDED = """
import atexit, importlib.abc, signal, sys
{ignoring}
class Sent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sinkscope.cli.show":
            signal.raise_signal(signal.{sent})

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Sent())
atexit.register(lambda: signal.raise_signal(signal.{again}))
from sinkscope.__main__ import command
sys.argv = ["sinkscope", "show", "run"]
command()
"""


def ended(sent: str, again: str, ignoring: str = "") -> tuple[int, str]:
    program = ENDED.format(sent=sent, again=again, ignoring=ignoring)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("again", ["SIGINT", "SIGTERM"])
def test_a_second_signal_while_python_ends_prints_nothing(sent: str, code: int, again: str) -> None:
    """Python's traceback of an interrupted end stood below the line that says all."""
    assert ended(sent, again) == (code, "sinkscope: interrupted\n")


def test_a_signal_that_is_to_be_ignored_is_ignored() -> None:
    code, told = ended("SIGTERM", "SIGTERM", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert code == 2
    assert told == "sinkscope: error: no such run folder: run\n"
