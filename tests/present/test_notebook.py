"""Runs and comparisons in a notebook: what they show, escaping, figures; and the notebook in examples/ executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from desk import enlarged, hostile, scanned
from markupsafe import escape
from matplotlib.figure import Figure
from pages import differences

import sinkscope
from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.run import draw
from sinkscope.present.notebook import LARGE

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[1m"


def test_a_run_shows_its_answer_and_a_map() -> None:
    run = scanned()
    html = run._repr_html_()
    assert escape(run.summary.streams["text"].in_words[0]) in html
    assert html.count("<rect x=") >= 12
    mass = run.heads.set_index(["layer", "head"]).loc[(1, 2), "bos_mass"]
    assert f"layer 1, head 2: first-token attention {mass:.4g}" in html
    assert repr(run).startswith("<Run of tiny"), "the plain text stays as it was"


def test_a_comparison_shows_differences_and_maps() -> None:
    result = sinkscope.compare(scanned(), scanned("noise"))
    html = result._repr_html_()
    assert html.count("<tr><td>") == len(result.summary)
    assert html.count('<svg class="map"') == len(result.metrics)
    assert "tiny (float32)" in html
    assert "Gained a sink:" in html


def test_nothing_of_a_model_becomes_markup() -> None:
    evil = hostile(scanned(), EVIL)
    for html in (evil._repr_html_(), sinkscope.compare(evil, evil)._repr_html_()):
        assert "<script" not in html
        assert "<img" not in html
        assert "\x1b" not in html
        assert html.count("</style>") == 1
        assert not re.findall(r"url\(|@import|https?:", html)


@pytest.mark.slow
def test_a_large_run_leaves_the_map_to_plot() -> None:
    run = enlarged(scanned(), 33, 64)
    assert len(run.heads) > LARGE
    html = run._repr_html_()
    assert "<svg" not in html
    assert "Too many heads for a map here" in html


@pytest.mark.slow
def test_a_figure_is_the_one_that_plot_draws(tmp_path: Path) -> None:
    run = scanned()
    found = run.plot("heatmap", metric="entropy", size="column")
    assert found._repr_svg_().encode() == draw(run, "heatmap", "svg", "column", "entropy")
    assert found.caption.startswith("entropy: ")
    assert found.save(tmp_path / "map.png").read_bytes() == draw(run, "heatmap", "png", "column", "entropy")
    with pytest.raises(SinkscopeError, match="not 'jpg'"):
        found.save(tmp_path / "map.jpg")
    assert not (tmp_path / "map.jpg").exists()


@pytest.mark.slow
def test_a_figure_over_runs_is_drawn_of_one() -> None:
    run = scanned()
    place = {"stream": "text", "layer": [0, 0, 1, 1], "position": [0, 1, 0, 1]}
    run.measured["alignment"] = pd.DataFrame(place | {"cos_residual": [1, 0.5, 1, 0.6], "cos_input": [1, 0.2, 1, 0.3]})
    found = run.plot("alignment")
    assert found.caption.startswith("Cosine of the first token's embedding")
    assert found._repr_svg_().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"figure": "heatmapp"}, "did you mean heatmap?"),
        ({"metric": "bosmass"}, "did you mean bos_mass"),
        ({"size": "huge"}, "--size 'huge'"),
        ({"figure": "smoothing"}, "smoothing"),
        ({"figure": "cosine", "metric": "entropy"}, "metric and domain belong to heatmap"),
        ({"domain": "code"}, "--domain 'code'"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_at_once(words: dict[str, str], said: str) -> None:
    with pytest.raises(SinkscopeError, match=re.escape(said)):
        scanned().plot(**words)


@pytest.mark.slow
def test_a_run_that_was_read_by_itself_shows_itself(tmp_path: Path) -> None:
    """In a process that has asked for no other name, and without torch."""
    scanned().save(tmp_path / "run")
    script = (
        "import sys; from sinkscope.runs.run import load_run; html = load_run(sys.argv[1])._repr_html_(); "
        "assert 'Attention sink' in html or 'No sink' in html; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


NOTEBOOK = Path(__file__).parents[2] / "examples" / "first-look.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], 4)
NotebookClient(book, timeout=600, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(book, sys.argv[3])
"""


def plain_outputs(cell: dict[str, Any]) -> list[str]:
    """The text of each output of a cell, whatever else the output also shows; without what libraries warn of."""
    outputs = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    shown = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs]
    return ["".join(text) for text in shown]


@pytest.mark.slow
@pytest.mark.real
def test_the_notebook_runs_and_shows_what_it_showed(tmp_path: Path) -> None:
    """In a process of its own, whose kernel needs sockets. Numbers may differ by two in the last digit."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, NOTEBOOK, tmp_path, tmp_path / "executed.ipynb"],
        env={**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[1])}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = (json.loads(path.read_text("utf-8"))["cells"] for path in (NOTEBOOK, tmp_path / "executed.ipynb"))
    shown = [
        (plain_outputs(a), plain_outputs(b)) for a, b in zip(before, after, strict=True) if a["cell_type"] == "code"
    ]
    assert sum(map(len, (committed for committed, _ in shown))) >= 4
    for committed, now in shown:
        assert [differences(a, b) for a, b in zip(now, committed, strict=True)] == [[]] * len(committed)
    html = [output for cell in after for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]
    assert len(html) >= 3


def test_the_committed_notebook_was_executed_in_order_and_names_no_folder() -> None:
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    counts = [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    text = NOTEBOOK.read_text("utf-8")
    assert not re.findall(r"/(?:tmp|home|root|work)/", text)
    assert "Traceback" not in text
    assert NOTEBOOK.stat().st_size < 500_000


@pytest.mark.parametrize("figure", ["heatmap", "length", "scatter"])
def test_a_figure_goes_onto_axes_that_are_there(figure: str) -> None:
    canvas = Figure()
    left, right = canvas.subplots(1, 2)
    assert scanned().plot(figure, ax=left, title="mine") is left
    assert left.get_title(loc="left") == "mine"
    assert left.has_data()
    assert not right.has_data()


def test_axes_are_refused_where_a_figure_has_several_panels() -> None:
    with pytest.raises(SinkscopeError, match="ax= takes heatmap, length, scatter"):
        scanned().plot("profile", ax=Figure().subplots())


def test_no_head_of_a_figure_is_a_sink_where_nothing_can_be_said_about_sinks() -> None:
    run = scanned()
    titles = []
    for uniform in (0.1, 0.31):
        run.summary.streams["text"].uniform_alpha_0.T = uniform
        for score in (0.01, 0.9):
            run.heads["sink_score"], axes = score, Figure().subplots()
            run.plot("length", ax=axes)
            titles.append(axes.get_title(loc="left").splitlines()[-1])
    assert [title.removesuffix(", ± standard error") for title in titles] == [
        "largest alpha_0, no sink", "strongest sinks", "largest alpha_0", "largest alpha_0",
    ]  # fmt: skip


def test_a_run_is_one_line_and_shows_a_few_columns_first() -> None:
    run = scanned()
    assert repr(run) == "<Run of tiny, 8 x 48 of token ids: 0 of 12 heads with a sink>"
    unmoved = "0 gained a sink, 0 lost a sink, 0 became active (no longer dormant), 0 became dormant"
    assert repr(sinkscope.compare(run, run)).endswith(f"paired: {unmoved}>")
    assert list(run.show("q_norm"))[-1] == "q_norm"
    assert len(run.show().columns) == 10 < len(run.heads.columns)
    with pytest.raises(SinkscopeError, match="no column of heads"):
        run.show("q_nrm")


def test_a_comparison_shows_heads_that_changed_also_where_the_runs_have_one_dataset() -> None:
    result = sinkscope.compare(scanned(), scanned("noise"), equivalence_margin={"bos_mass": 0.1})
    result.changes["gained_sink"] = [
        {"stream": "text", "layer": 1, "head": 2, "metric": "sink_score", "a": 0.2, "b": 0.45, "q": 0.003}
    ]
    shown = result._repr_html_()
    assert "1.2 (0.2 to 0.45, q 0.003)" in shown
    assert "Equivalence of bos_mass within ±0.1: the mean over all heads is shown to be equivalent" in shown
