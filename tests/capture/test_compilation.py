"""A scan says that it waits for loops to be compiled, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sinkscope.capture.loops.compilation import Compilation
from sinkscope.engine.stages import Stages

PROGRAM = """
import threading
from sinkscope.capture import loops
from sinkscope.capture.loops.compilation import COMPILATION
told = []
with COMPILATION.told(told.append):
    loops.loops("normalised")
print(told)
"""


@pytest.mark.slow
def test_only_the_first_process_compiles(tmp_path: Path) -> None:
    """numba keeps what it compiles in a cache folder, which is new here."""
    pytest.importorskip("numba")
    asked = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=asked, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    first, later = (line.strip() for line in said)
    assert first.startswith("[True")
    assert first.endswith("False]")
    assert later == "[False]"


def test_a_thread_tells_of_the_compilation_that_it_waits_for() -> None:
    compilation, told = Compilation(), []
    began, over = threading.Event(), threading.Event()

    def compile_one() -> None:
        compilation.began()
        began.set()
        over.wait(60)
        compilation.ended()

    other = threading.Thread(target=compile_one)
    with compilation.told(told.append):
        with compilation.awaited():
            assert told == []
        other.start()
        began.wait(60)
        assert told == [False], "another thread's compilation is told where this one waits for it"
        with compilation.awaited():
            assert told == [False, True]
            over.set()
            other.join()
        assert told == [False, True, False]
    compilation.began()
    assert told == [False, True, False], "nobody is told after the block"


def test_the_stage_before_comes_back() -> None:
    told: list[tuple[str, int, int]] = []
    stages = Stages(lambda *stage: told.append(stage))
    stages("checking", 0, 8)
    stages.compiling(False)
    stages.compiling(True)
    stages.compiling(True)
    stages.compiling(False)
    assert told == [("checking", 0, 8), ("compiling", 0, 0), ("checking", 0, 8)]
    stages.compiling(True)
    stages("scanning", 0, 8)
    stages.compiling(False)
    assert told[3:] == [("compiling", 0, 0), ("scanning", 0, 8)]
