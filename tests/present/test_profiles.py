"""Profiles of several runs: their lines, the horizontal axis, and what the command takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from boxes import faults_when_saved
from desk import enlarged, scanned
from matplotlib.figure import Figure
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.canvas import WIDTHS
from sinkscope.present.figures.profiles import MOST, draw_profiles
from sinkscope.runs.run import Run

LONG = "somebody/a-model-with-an-uncommonly-long-name-and-a-suffix-instruct"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def seen(canvas: Figure, *args: Any, **options: Any) -> None:
        figures.append(canvas)
        save(canvas, *args, **options)

    monkeypatch.setattr(Figure, "savefig", seen)
    return figures


def named(run: Run, name: str) -> Run:
    run.manifest.model.id = name
    return run


@pytest.mark.slow
def test_models_of_different_depth_stand_over_relative_depth(saved: list[Figure]) -> None:
    runs = [named(scanned(), "three"), named(scanned(layers=5), "five")]
    _, caption = draw_profiles(runs, "svg")
    top, *_, bottom = saved[0].axes
    assert [line.get_xdata().tolist() for line in top.lines] == [[0, 0.5, 1], [0, 0.25, 0.5, 0.75, 1]]
    for line, run in zip(top.lines, runs, strict=True):
        assert line.get_ydata().tolist() == run.layers["mean_bos_mass"].tolist()
    assert bottom.get_xlabel().startswith("relative depth")
    assert "over relative depth" in caption
    assert [text.get_text() for text in saved[0].legends[0].get_texts()] == ["three", "five"]


@pytest.mark.slow
def test_models_of_one_depth_stand_over_layers(saved: list[Figure]) -> None:
    content, caption = draw_profiles([scanned(), scanned("noise")], "svg")
    assert content == draw_profiles([scanned(), scanned("noise")], "svg")[0]
    assert saved[0].axes[0].lines[1].get_xdata().tolist() == [0, 1, 2]
    assert saved[0].axes[-1].get_xlabel() == "layer"
    assert "by layer" in caption


def test_a_single_layer_is_named_by_its_number(saved: list[Figure]) -> None:
    runs = [named(scanned(), "a"), named(scanned(), "b")]
    for run in runs:
        run.layers = run.layers[run.layers["layer"] == 0]
    draw_profiles(runs, "png")
    ticks = saved[-1].axes[-1].get_xticks()
    assert all(tick == round(tick) for tick in ticks)
    assert 0 in ticks


def test_more_profiles_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(SinkscopeError, match="cannot be told apart"):
        draw_profiles([scanned()] * (MOST + 1), "svg")


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize(
    ("layers", "runs"),
    slow_but([(layers, runs) for layers in (12, 30, 80) for runs in (2, 4)], (30, 4)),
)  # fmt: skip
def test_no_word_runs_into_another(layers: int, runs: int, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_when_saved(monkeypatch)
    shown = [named(enlarged(scanned(), layers, 2), LONG), *(scanned(text=each) for each in range(1, runs))]
    draw_profiles(shown, "png", size)
    assert not found


@pytest.mark.slow
def test_the_command_takes_one_run_or_several(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    scanned(layers=5).save(tmp_path / "b")

    def plot(*words: object) -> Any:
        return CliRunner().invoke(app, ["plot", *map(str, words), "-o", str(tmp_path / "p.svg")])

    done = plot(tmp_path / "a", tmp_path / "b", "--figure", "profile")
    assert done.exit_code == 0, done.output
    assert "over relative depth" in done.stdout
    refused = plot(tmp_path / "a", tmp_path / "b", "--figure", "profile", "--domain", "x")
    assert refused.exit_code == 2
    assert "--domain belongs to figures of one run" in refused.stderr
    refused = plot(tmp_path / "a", tmp_path / "b", "--figure", "length")
    assert refused.exit_code == 2
    assert "shows one run" in refused.stderr
