"""The progress bars, on a real terminal: what they say, and that they leave stderr alone where there is none."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from models import random_ids, tiny

import sinkscope
from sinkscope.present.terminal.progress import STAGES, progress_bar, training_bar

Shown = Callable[[], str]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
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
        for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", stream)
        try:
            yield shown
        finally:
            shown()
            os.close(ours)


def test_the_bar_names_the_stage_the_count_and_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with progress_bar(False) as report:
            for stage in STAGES:
                for done in range(4):
                    report(stage, done, 0 if stage == "loading" else 3)
                    time.sleep(0.01)
        text = shown()
    for stage, words in STAGES.items():
        assert words in text, stage
    assert "3/3" in text
    assert "seq/s" in text
    assert "\x1b[2K" in text[text.rindex("3/3") :], "the line is erased when all is done"


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


@pytest.mark.parametrize("quiet", [True, False])
def test_nothing_is_drawn_when_quiet_or_into_a_file(quiet: bool, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with progress_bar(quiet) as report, training_bar(quiet) as (begin, steps):
        report("scanning", 1, 2)
        begin("softmax", 2)
        steps(1, 0.1, 0.1, 0.1)
    assert capfd.readouterr() == ("", "")
