"""No figure cuts a word off or sets one over another, whatever the number of layers and the figure's width."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from boxes import faults, faults_when_saved
from desk import enlarged, scanned, smoothed
from matplotlib.figure import Figure
from tiers import thinned

from sinkscope.experiments.attention_map import HeadMap
from sinkscope.present.figures import SINGLE
from sinkscope.present.figures.canvas import WIDTHS
from sinkscope.present.figures.maps import draw_attention, draw_gallery, gallery_heads
from sinkscope.present.figures.run import draw
from sinkscope.present.figures.several import draw_several, table_figures
from sinkscope.runs.run import Run

SHAPES = ((12, 12), (18, 4), (30, 9), (80, 64))
"""Layers and heads."""
LONG = "somebody/a-model-with-an-uncommonly-long-name-and-a-suffix-instruct"


def named(run: Run, name: str) -> Run:
    run.manifest.model.id = name
    return run


def test_words_that_are_cut_or_run_together_are_found() -> None:
    canvas = Figure(figsize=(2, 2), dpi=100)
    canvas.text(0.9, 0.5, "beyond the edge")
    canvas.text(0.1, 0.2, "one")
    canvas.text(0.1, 0.2, "other")
    found = faults(canvas)
    assert len(found) == 2
    assert found[0].startswith("'beyond the edge' is cut off")
    assert found[1] == "'one' runs into 'other'"


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize(
    ("figure", "shape"),
    thinned([(figure, shape) for figure in SINGLE for shape in SHAPES], 3),
)  # fmt: skip
def test_a_figure_of_one_run(figure: str, shape: tuple[int, int], size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_when_saved(monkeypatch)
    draw(named(enlarged(scanned(), *shape), LONG), figure, "png", size)
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize(
    ("figure", "layers", "runs"),
    thinned((figure, *rest) for figure in table_figures() for rest in product((12, 30, 80), (1, 2, 4))),
)  # fmt: skip
def test_a_figure_over_several_runs(
    figure: str, layers: int, runs: int, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = faults_when_saved(monkeypatch)
    first = enlarged(smoothed(), layers, 4)
    if runs > 1:
        first = named(first, LONG)
    draw_several([first, *(smoothed(seed) for seed in range(1, runs))], figure, "png", size)
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("tokens", [6, 24, 80])
def test_maps_of_one_and_two_models(tokens: int, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_when_saved(monkeypatch)
    run = named(enlarged(scanned(), 80, 64), LONG)
    weights = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    words = [f"\u2581token{place}" for place in range(tokens)]
    maps = [HeadMap(layer, head, weights, words) for layer, head, _ in gallery_heads(run)]
    draw_attention(run, maps[:1], "a text", "png", size)
    draw_attention(run, maps[:2], "a text", "png", size)
    draw_gallery([(run, maps)], "a text", "png", size)
    draw_gallery([(run, maps), (run, maps)], "a text", "png", size)
    assert not found
