"""Sentences on a screen are wrapped at the width of the terminal, and at 80 columns where it is wider."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.cli.plot import as_read
from sinkscope.present.text import wrapped

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUN = str(FIXTURES / "v0_1" / "smoothing")
PLAIN, WINDOWED = (str(FIXTURES / "v0_2" / name) for name in ("plain", "windowed"))
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


def test_the_caption_of_a_figure_is_wrapped_on_a_terminal_alone() -> None:
    assert as_read(SENTENCE.strip(), on_terminal=False) == f"{SENTENCE.strip()}\n"
    lines = as_read(SENTENCE, on_terminal=True).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert " ".join(lines) == SENTENCE.strip()


@pytest.mark.parametrize(
    "words",
    [
        ("check", RUN, "--baseline", RUN),
        ("claims", "--list"),
        ("examples",),
        ("metrics", "bos_mass"),
        ("scan", "example:trigger-softmax", "--dry-run"),
        ("show", RUN),
        ("compare", PLAIN, WINDOWED, "--unpaired"),
        ("schema",),
        ("trigger", "scan", "example:trigger-relu", "--num-sequences", "20"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("columns", slow_but([40, 60], 40))
def test_a_screen_fits_a_narrow_terminal(columns: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > columns and " " in line.strip()] == []
