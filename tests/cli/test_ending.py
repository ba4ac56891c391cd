"""A command's process ends at once, and loses nothing that was written and nobody who wants to be called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from tiers import slow_but

PROGRAM = """
import atexit, sys, types
from sinkscope.cli.signals import end, end_at_once, leave_to_python
{before}
end_at_once()
atexit.register(print, "called")
sys.modules["torch"] = types.ModuleType("torch")
class Left:
    def __del__(self):
        print("freed")
left = Left()
file = open(sys.argv[1], "w", encoding="utf-8")
file.write("whole")
{end}
"""


def said(tmp_path: Path, end: str, before: str = "") -> tuple[int, list[str], str]:
    """The exit code of the program, the lines that it prints, and what stands in the file that it leaves open."""
    program, file = PROGRAM.format(end=end, before=before), tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), file.read_text("utf-8")


def test_what_is_left_is_not_freed(tmp_path: Path) -> None:
    assert said(tmp_path, "end(3)") == (3, ["called"], "whole")


@pytest.mark.parametrize(
    ("end", "code"),
    slow_but(
        [("raise ValueError", 1), ("sys.exit(4)", 4), ("", 0), ("leave_to_python(); end(5)", 5)],
        ("raise ValueError", 1),
        ("leave_to_python(); end(5)", 5),
    ),
)
def test_any_other_process_ends_as_python_does(end: str, code: int, tmp_path: Path) -> None:
    assert said(tmp_path, end) == (code, ["called", "freed"], "whole")


def test_who_registered_earlier_is_called_too(tmp_path: Path) -> None:
    before = 'atexit.register(print, "earlier")'
    assert said(tmp_path, "end(3)", before) == (3, ["called", "earlier", "freed"], "whole")


METRIC = """
from sinkscope import head_metric

class Left:
    def __del__(self):
        print("freed")

left = Left()

@head_metric(unit="1", range="0 to 1")
def half(view):
    \"\"\"A half.\"\"\"
    return view.attention.first.mean(-1) * 0 + 0.5
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "left"), [(["-m", "sinkscope"], []), (["-c", "from sinkscope.cli import main; main()"], ["freed"])]
)
def test_what_a_metric_leaves(started: list[str], left: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    """The command ends at once; a program that imports it ends as Python does."""
    metric, run = tmp_path / "metric.py", tmp_path / "run"
    metric.write_text(METRIC, "utf-8")
    asked = [str(tiny_folder), "--num-sequences", "2", "--metrics", str(metric), "--quiet", "--out", str(run)]
    done = subprocess.run([sys.executable, *started, "scan", *asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == left
    assert set(pd.read_csv(run / "heads.csv")["half"]) == {0.5}


INTERRUPTED = """
import importlib.abc, signal, sys

class Pressed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.meta_path.insert(0, Pressed())
from sinkscope.__main__ import command
sys.argv = ["sinkscope", "show", "run"]
command()
"""


@pytest.mark.parametrize("name", ["typer", "sinkscope.cli", "sinkscope.cli.show"])
def test_an_interrupt_while_the_command_begins_is_one_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(name=name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sinkscope: interrupted\n")
