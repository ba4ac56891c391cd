"""The progress bars, on a real terminal: what they say, and that they leave stderr alone where there is none."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from models import random_ids, tiny

import sinkscope
from sinkscope.present.terminal.progress import STAGES, Lines, Pace, progress_bar, training_bar

Shown = Callable[[], str]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[Shown]:
    """Within the block stderr is a terminal, until the function is called: it closes it and returns what it showed.

    No fixture: pytest sets stderr anew between a fixture and its test.
    """
    import pty

    ours, theirs = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # Linux's way of saying that the terminal's other end is closed
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(theirs, "w", encoding="utf-8")

    def shown() -> str:
        stream.close()
        reader.join(10)
        return b"".join(parts).decode()

    with monkeypatch.context() as patch:
        for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", stream)
        try:
            yield shown
        finally:
            shown()
            os.close(ours)


@pytest.mark.slow
def test_the_bar_names_the_stage_the_count_and_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with progress_bar(False) as report:
            for stage in STAGES:
                for done in range(4):
                    report(stage, done, 0 if stage == "loading" else 3)
                    time.sleep(0.01)
        text = shown()
    for stage, words in STAGES.items():
        assert words.partition("{")[0] in text, stage
    assert "3/3" in text
    assert "seq/s" in text
    assert "\x1b[2K" in text[text.rindex("3/3") :], "the line is erased when all is done"


def test_nothing_is_drawn_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """`claims` on a saved run drew a bar without a word beside it: such a run is only read."""
    with terminal(monkeypatch) as shown:
        with progress_bar(False):
            time.sleep(0.3)
        text = shown()
    assert "\u2501" not in text


def test_a_scan_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with progress_bar(False) as report:
            sinkscope.scan(tiny("llama"), data=random_ids(3, 20), batch_size=1, progress=report)
        text = shown()
    assert "self-check against eager" in text
    assert "3/3" in text


def test_a_training_shows_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with training_bar(False) as (begin, report):
            begin("softmax (1 of 2)", 100)
            report(50, 1e-3, 0.02, 0.9)
        text = shown()
    assert "softmax (1 of 2)" in text
    assert "50/100" in text
    assert "loss 1.0e-03  largest error 0.0200  BOS mass 0.900" in text


@pytest.mark.parametrize("columns", [60, 90])
def test_a_narrow_bar_keeps_the_count_and_the_time(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It showed `959/5...`: the name of the model is cut first, then the note."""
    with terminal(monkeypatch, columns) as shown:
        with training_bar(False) as (begin, report):
            begin("learned-sink 4x4 seed 0, default self (1 of 2)", 50000)
            time.sleep(0.02)
            report(959, 1e-3, 0.02, 0.9)
            time.sleep(0.15)
        text = shown()
    assert re.search(r"959/50000  \d+:\d\d left", text)
    assert ("BOS mass 0.900" in text) == (columns == 90)


@pytest.mark.parametrize("quiet", [True, False])
def test_nothing_is_drawn_when_quiet_or_into_a_file(quiet: bool, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with progress_bar(quiet) as report, training_bar(quiet) as (begin, steps):
        report("scanning", 1, 2)
        begin("softmax", 2)
        steps(1, 0.1, 0.1, 0.1)
    assert capfd.readouterr() == ("", "")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_known_where_a_batch_takes_minutes() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("scanning", "scanning", 0, 32)
    clock.now = 120.0
    assert pace.state() == "0/32  2:00 so far"
    pace.go_on(8)
    assert pace.state() == "8/32  15.0 s/seq  6:00 left"
    clock.now = 180.0
    assert pace.state() == "8/32  15.0 s/seq  5:00 left", "it runs down while a batch is computed"
    clock.now = 420.0
    assert pace.state() == "8/32  15.0 s/seq  4:00 left", "two batches come after this one, however long it takes"


def test_a_resumed_scan_counts_its_own_pace() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("scanning", "scanning", 24, 32)
    clock.now = 10.0
    pace.go_on(26)
    assert pace.left() == pytest.approx(30.0)


def test_the_speed_keeps_its_digits_in_fast_and_slow_scans() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("scanning", "scanning", 0, 32)
    clock.now = 2.0
    pace.go_on(5)
    assert pace.state() == "5/32  2.5 seq/s  0:11 left"
    clock.now = 250.0
    pace.go_on(6)
    assert pace.state() == "6/32  41.7 s/seq  18:03 left"


def test_work_without_a_count_is_not_said_to_have_no_time_left() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("converting", "converting", 0, 2**30)
    clock.now = 20.0
    pace.go_on(2**30)
    assert pace.state() == "1.00/1.00 GiB  0:00 left"
    clock.now = 80.0
    assert pace.state() == "1.00/1.00 GiB  finishing"
    pace.begin("loading", "loading the model", 0, 0)
    clock.now = 100.0
    assert pace.state() == "0:20 so far", "nothing is counted here"


def test_bytes_are_counted_in_gib() -> None:
    pace = Pace(Clock())
    pace.begin("converting", "converting", 2**29, 2**30)
    assert pace.count() == "0.50/1.00 GiB"


def test_without_a_terminal_a_line_is_due_each_tenth_and_each_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(Pace(clock))
    lines.look()
    lines.pace.begin("scanning", "scanning", 0, 20)
    for second in range(1, 201):
        clock.now = float(second)
        if second % 15 == 0 and second <= 60:
            lines.pace.go_on(2 * second // 15)
        lines.look()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0] for line in said] == [
        f"sinkscope: scanning: {done}/20" for done in (0, 2, 4, 6, 8, 8, 8)
    ]
    assert said[1].endswith("7.5 s/seq  2:10 left")


def test_short_work_prints_no_lines(capfd: Any) -> None:
    with progress_bar(False) as report:
        for done in range(11):
            report("scanning", done, 10)
    assert capfd.readouterr() == ("", "")


def test_dequantising_says_how_many_bytes(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    from sinkscope.checkpoints.gguf_files import dequantizing

    path = tmp_path / "two.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones((4, 8), np.float16))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    said: list[tuple[str, int, int]] = []
    before = gguf.dequantize
    with dequantizing(lambda *words: said.append(words)):
        for tensor in gguf.GGUFReader(path).tensors:
            gguf.dequantize(tensor.data, tensor.tensor_type)
    assert said == [("dequantizing", 128, 256), ("dequantizing", 256, 256)]
    assert gguf.dequantize is before
