"""Sentences on a screen are wrapped at the width of the terminal, and at 80 columns where it is wider."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.present.text import wrapped

RUN = str(Path(__file__).parents[1] / "fixtures" / "v0_1" / "smoothing")
SENTENCE = "A head has a sink where it attends to the first token more than a threshold says. " * 3


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("60", 60), ("1", 40), ("200", 80), ("many", 80)], ids=str)
def test_a_sentence_is_as_wide_as_the_terminal(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    widest = max(map(len, wrapped(SENTENCE)))
    assert width - len("threshold") < widest <= width


@pytest.mark.parametrize(
    "words",
    [
        ("check", RUN, "--baseline", RUN),
        ("claims", "--list"),
        ("examples",),
        ("metrics", "bos_mass"),
        ("scan", "example:trigger-softmax", "--dry-run"),
        ("show", RUN),
    ],
    ids=lambda words: words[0],
)
def test_a_screen_fits_a_terminal_of_60_columns(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 60 and " " in line.strip()] == []
