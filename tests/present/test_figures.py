"""Figures: formats, sizes, equal bytes, the run's id, names as data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from desk import enlarged, hostile, scanned
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.canvas import WIDTHS
from sinkscope.present.figures.run import draw, draw_attention
from sinkscope.present.identity import run_id
from sinkscope.runs.run import Run

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("figure", ["heatmap", "profile", "length", "scatter"])
def test_every_figure_twice_the_same_with_the_runs_id(figure: str) -> None:
    run = scanned()
    content = draw(run, figure, "svg")
    assert content.startswith(STARTS["svg"])
    assert content == draw(scanned(), figure, "svg")
    assert run_id(run).encode() in content


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_formats(form: str) -> None:
    content = draw(scanned(), "heatmap", form)
    assert content.startswith(STARTS[form])
    assert content == draw(scanned(), "heatmap", form)
    assert run_id(scanned()).encode() in content


@pytest.mark.parametrize("size", ["column", "page"])
def test_sizes(size: str) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(draw(scanned(), "scatter", "png", size)))
    assert image.width == pytest.approx(300 * WIDTHS[size], abs=2)


@pytest.mark.parametrize("figure", ["heatmap", "profile", "length", "scatter"])
def test_no_title_is_cut(figure: str) -> None:
    """The last columns of pixels stay white: a title longer than the figure would run through them."""
    from PIL import Image

    run = scanned()
    run.manifest["model"]["id"] = "somebody/a-model-with-an-uncommonly-long-name-and-a-suffix-instruct"
    image = np.asarray(Image.open(io.BytesIO(draw(run, figure, "png"))).convert("L"))
    assert (image[: image.shape[0] // 8, -4:] == 255).all()


def test_ids_tell_runs_apart() -> None:
    assert run_id(scanned()) == run_id(scanned())
    assert run_id(scanned()) != run_id(scanned(text=1))


def test_missing_values_and_names_with_mathematics() -> None:
    run = hostile(scanned(), "$x^{2$_<script>")
    run.heads["honor"] = np.nan
    run.layers["norm_ratio"] = np.nan
    for figure in ("heatmap", "profile", "length", "scatter"):
        assert b"<script>" not in draw(run, figure, "svg")


def test_large_maps_and_other_metrics() -> None:
    big: Run = enlarged(scanned(), 32, 32)
    assert draw(big, "heatmap", "png", "page", "entropy").startswith(STARTS["png"])


@pytest.mark.parametrize(
    ("figure", "form", "size", "metric"),
    [("pie", "png", "column", "bos_mass"), ("heatmap", "gif", "column", "bos_mass"),
     ("heatmap", "png", "poster", "bos_mass"), ("heatmap", "png", "column", "pattern"),
     ("heatmap", "png", "column", "nothing")],
)  # fmt: skip
def test_bad_choices(figure: str, form: str, size: str, metric: str) -> None:
    with pytest.raises(SinkscopeError):
        draw(scanned(), figure, form, size, metric)


def test_attention_of_one_head() -> None:
    weights = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    tokens = ["<bos>", "$a_", "語", "\x1b[1m", "e"]
    content = draw_attention(scanned(), weights, tokens, 1, 2, "svg")
    assert content == draw_attention(scanned(), weights, tokens, 1, 2, "svg")
    assert b"\x1b" not in content


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    out = tmp_path / "map.pdf"
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "run"), "--figure", "heatmap", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(STARTS["pdf"])
    refused = CliRunner().invoke(app, ["plot", str(tmp_path / "run"), "--figure", "attention", "-o", str(out)])
    assert refused.exit_code == 2
    assert "--layer" in refused.stderr
