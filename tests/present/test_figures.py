"""Figures: formats, sizes, equal bytes, the run's id, names as data."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from desk import enlarged, hostile, scanned
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.attention_map import HeadMap
from sinkscope.present.colors import CONTROL, DIVERGING, MAP
from sinkscope.present.figures import arms as ablation_figure
from sinkscope.present.figures.canvas import WIDTHS, plain_axis
from sinkscope.present.figures.maps import _shown as beside
from sinkscope.present.figures.maps import draw_attention
from sinkscope.present.figures.profiles import draw_profiles
from sinkscope.present.figures.run import _heatmap, draw, draw_on
from sinkscope.present.figures.several import caption
from sinkscope.present.html.report import render_report
from sinkscope.present.text import run_id
from sinkscope.runs.run import Run
from sinkscope.runs.saved.ablation import Ablation
from sinkscope.trigger.figure import attention, forced_mass, trajectory

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.slow
@pytest.mark.parametrize("figure", slow_but(["heatmap", "profile", "length", "scatter"], "heatmap"))
def test_every_figure_twice_the_same_with_the_runs_id(figure: str) -> None:
    run = scanned()
    content = draw(run, figure, "svg")
    assert content.startswith(STARTS["svg"])
    assert content == draw(scanned(), figure, "svg")
    assert run_id(run).encode() in content


@pytest.mark.parametrize("form", slow_but(["png", "pdf"]))
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


@pytest.mark.parametrize("figure", slow_but(["heatmap", "profile", "length", "scatter"], "profile"))
def test_no_title_is_cut(figure: str) -> None:
    """The last columns of pixels stay white: a title longer than the figure would run through them."""
    from PIL import Image

    run = scanned()
    run.manifest.model.id = "somebody/a-model-with-an-uncommonly-long-name-and-a-suffix-instruct"
    for data in run.manifest.data:
        data.domain = "hf:somebody/an-uncommonly-long-name/train#text"
    run.sequences["domain"] = "hf:somebody/an-uncommonly-long-name/train#text"
    image = np.asarray(Image.open(io.BytesIO(draw(run, figure, "png"))).convert("L"))
    assert (image[: image.shape[0] // 8, -4:] == 255).all()


def test_ids_tell_runs_apart() -> None:
    assert run_id(scanned()) == run_id(scanned())
    assert run_id(scanned()) != run_id(scanned(text=1))


@pytest.mark.slow
def test_missing_values_and_names_with_mathematics() -> None:
    run = hostile(scanned(), "$x^{2$_<script>")
    run.heads["honor"] = np.nan
    run.layers["norm_ratio"] = np.nan
    for figure in ("heatmap", "profile", "length", "scatter"):
        assert b"<script>" not in draw(run, figure, "svg")


@pytest.mark.slow
def test_large_maps_and_other_metrics() -> None:
    big: Run = enlarged(scanned(), 32, 32)
    assert draw(big, "heatmap", "png", "page", "entropy").startswith(STARTS["png"])


@pytest.mark.parametrize(
    ("figure", "form", "size", "metric"),
    [("pie", "png", "column", "bos_mass"), ("heatmap", "gif", "column", "bos_mass"),
     ("heatmap", "png", "poster", "bos_mass"), ("heatmap", "png", "column", "pattern"),
     ("heatmap", "png", "column", "nothing"), ("profile", "png", "column", "entropy")],
)  # fmt: skip
def test_bad_choices(figure: str, form: str, size: str, metric: str) -> None:
    with pytest.raises(SinkscopeError):
        draw(scanned(), figure, form, size, metric)


@pytest.mark.parametrize("metric", ["layer", "head", "dormant", "kind", ""])
def test_a_place_or_a_word_is_no_metric_of_a_heat_map(metric: str) -> None:
    with pytest.raises(SinkscopeError, match=f"'{metric}': not a measured number of heads.csv") as refused:
        draw(scanned(), "heatmap", "png", metric=metric)
    assert "did you mean" not in str(refused.value)
    assert "it is a column of heads" not in str(refused.value)


def heat_map_of(metric: str, run: Run | None = None) -> Figure:
    canvas = Figure()
    _heatmap(canvas, run or scanned(), metric)
    return canvas


def test_an_interrupted_run_counts_what_was_measured() -> None:
    run = scanned()
    run.manifest.complete = False
    run.sequences = run.sequences[run.sequences["sequence"] < 3]
    assert "\n3 x 48 tokens" in heat_map_of("bos_mass", run).axes[0].get_title(loc="left")


@pytest.mark.parametrize("weight", [7.5, -7.5])
def test_weights_beyond_shares_are_drawn_whole(weight: float) -> None:
    """Attention that is no softmax has weights beyond 0 and 1."""
    run = scanned()
    run.heads.loc[0, "bos_mass"] = weight
    low, high = heat_map_of("bos_mass", run).axes[0].images[0].get_clim()
    assert low <= weight <= high
    canvas = Figure()
    axes = draw_on(canvas.subplots(), run, "scatter")
    left, right = axes.get_xlim()
    assert left < weight < right


@pytest.mark.parametrize(
    ("figure", "table", "column", "place"),
    [
        ("scatter", "heads", "bos_mass", "head 1.2"), ("scatter", "heads", "honor", "head 1.2"),
        ("profile", "layers", "norm_ratio", "layer 1"), ("profile", "layers", "cos_first_residual_sem", "layer 1"),
        ("length", "length_curve", "sink_score", "head 1.2"),
    ],
)  # fmt: skip
def test_an_infinite_value_is_named_where_an_axis_would_show_it(
    figure: str, table: str, column: str, place: str
) -> None:
    """matplotlib failed in words of its own: `Axis limits cannot be NaN or Inf`."""
    run = scanned()
    rows = getattr(run, table).copy()
    there = (rows["layer"] == 1) & (rows["head"] == 2 if "head" in rows else True)
    rows.loc[there, column] = np.inf
    run = replace(run, **{table: rows})
    told = f"^--figure {figure}: {column} of {place} is infinite, and no axis shows that$"
    with pytest.raises(SinkscopeError, match=told):
        draw(run, figure, "svg")
    if figure == "profile":
        with pytest.raises(SinkscopeError, match=told):
            draw_profiles([run, scanned()], "svg")


@pytest.mark.parametrize("figure", slow_but(["profile", "scatter"], "scatter"))
def test_layers_are_whole_numbers(figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    for layers, named in ((1, [0]), (3, [0, 1, 2])):
        run = scanned()
        run.heads, run.layers = (table[table["layer"] < layers] for table in (run.heads, run.layers))
        draw(run, figure, "png")
        last = drawn[-1].axes[-1]
        assert list(last.get_xticks() if figure == "profile" else last.get_yticks()) == named


def test_the_caption_names_the_stream_where_a_run_has_several() -> None:
    run = scanned()
    assert "stream" not in caption(run, "scatter")
    run.heads = pd.concat([run.heads.assign(stream="encoder"), run.heads.assign(stream="decoder")])
    assert caption(run, "scatter").endswith("8 sequences of 48 tokens of token ids, stream encoder.")


def test_the_caption_of_an_error_says_of_which_column_it_is() -> None:
    said = caption(scanned(), "heatmap", "bos_mass_sem")
    assert said.startswith("bos_mass_sem: standard error of bos_mass over sequences. One cell a head. ")


def test_a_heat_map_says_once_what_it_shows() -> None:
    axes, bar = heat_map_of("bos_mass").axes
    assert bar.get_xlabel() == "first-token attention (probability)"
    assert axes.get_title(loc="left") == "tiny\n8 x 48 tokens, float32, token ids"
    assert axes.get_aspect() == 1, "cells are square"
    assert axes.images[0].get_clim() == (0, 1)
    assert axes.images[0].get_cmap().name == MAP


def test_a_signed_column_has_a_colour_for_each_sign() -> None:
    axes, bar = heat_map_of("sink_margin").axes
    low, high = axes.images[0].get_clim()
    assert low == -high < 0
    colors = axes.images[0].get_cmap()
    assert [to_hex(colors(place)) for place in (0.0, 1.0)] == [DIVERGING[0], DIVERGING[-1]]
    assert bar.get_xlabel() == "sink margin (nats)"


@pytest.mark.parametrize(
    ("figure", "option"),
    [("profile", "--metric"), ("attention", "--metric"), ("heatmap", "--layer"), ("length", "--head"),
     ("scatter", "--text"), ("heatmap", "--trust-remote-code")],
)  # fmt: skip
def test_an_option_of_another_figure_is_refused(figure: str, option: str, tmp_path: Path) -> None:
    """Before a run is even read: the folder does not exist."""
    value = [] if option == "--trust-remote-code" else ["1"]
    arguments = ["plot", str(tmp_path / "run"), "--figure", figure, "-o", str(tmp_path / "f.png"), option, *value]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert f"{option} belongs to --figure" in refused.stderr


def test_the_control_of_an_ablation_is_grey_beside_any_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["bos_mass:low", "honor:low", "random"]
    table = pd.DataFrame([
        {"arm": arm, "fraction": share, "increase": 0.1, "increase_sem": 0.01, "spread": 0.02}
        for arm in arms for share in (0.05, 0.2)
    ])  # fmt: skip
    canvas = Figure()
    monkeypatch.setattr(ablation_figure, "drawn", lambda paint, about, form, size: paint(canvas) or b"")
    for each in (table, table[table["arm"] != "honor:low"]):
        canvas.clear()
        canvas.legends.clear()
        ablation_figure.draw_ablation(Ablation(each, pd.DataFrame(), {}, {"model": {"id": "tiny"}}, [], []))
        axes = canvas.axes[0]
        assert {line.get_color() for line in axes.lines if line.get_linestyle() == "--"} == {CONTROL}
        assert [text.get_text() for text in axes.get_xticklabels()] == ["5", "20"]


@pytest.mark.slow
def test_the_trigger_study_s_figures_are_drawn_alike() -> None:
    maps = torch.tril(torch.ones(2, 1, 4, 4)) / torch.arange(1, 5)[:, None]
    curve = pd.DataFrame({"mass": [0.5, 0.9, 1.0], "error": [0.1, 0.02, 0.0], "loss": [0.01, 0.001, 0.0]})
    steps = {"step": [0, 0, 9, 9], "layer": 0, "head": [0, 1] * 2, "bos_mean": [0.1, 0.2, 0.9, 1.0], "error": 0.5}
    draws = (
        lambda: attention(maps, "softmax-2x1"),
        lambda: forced_mass(curve),
        lambda: trajectory(pd.DataFrame(steps), "softmax-1x2"),
    )
    for draw_again in draws:
        content = draw_again()
        assert content.startswith(STARTS["png"])
        assert b"sinkscope trigger study" in content
        assert content == draw_again()


@pytest.mark.parametrize(("normalised", "unit"), [(False, "unnormalised weight"), (True, "probability"), (None, "unn")])
def test_weights_that_are_no_shares_are_called_weights(normalised: bool | None, unit: str) -> None:
    run = scanned()
    for site in run.manifest.attention:
        site.score, site.normalised = "relu", normalised
    said = f"first-token attention ({unit}"
    heat, dots = heat_map_of("bos_mass", run), Figure().subplots()
    assert heat.axes[1].get_xlabel().startswith(said)
    assert draw_on(dots, run, "scatter").get_xlabel().startswith(said)
    page = render_report([run])
    assert page.count(f"({unit}") >= 2
    assert ("(probability)" in page) == (unit == "probability")


def test_attention_of_one_head() -> None:
    maps = [HeadMap(1, 2, np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None], ["<bos>", "$a_", "語", "\x1b[1m", "e"])]
    content, caption = draw_attention(scanned(), maps, "a text", "svg")
    assert content == draw_attention(scanned(), maps, "a text", "svg")[0]
    assert b"\x1b" not in content
    assert b"layer 1, head 2" in content
    assert "'a text'" in caption


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    out = tmp_path / "map.pdf"
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "run"), "--figure", "heatmap", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(STARTS["pdf"])
    refused = CliRunner().invoke(app, ["plot", str(tmp_path / "run"), "--figure", "attention", "-o", str(out)])
    assert refused.exit_code == 2
    assert "--layer" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("figure", slow_but(["heatmap", "profile", "length", "scatter"], "length"))
def test_a_domain_is_drawn_by_name(figure: str) -> None:
    """The first where none is named; the title says which."""
    run = scanned()
    for name in ("heads", "layers", "length_curve", "sequences"):
        own = getattr(run, name).assign(domain="a")
        other = own.assign(domain="b")
        for column in {"bos_mass", "sink_score", "mean_bos_mass"} & set(own):
            other[column] = own[column] / 2
        setattr(run, name, pd.concat([own, other], ignore_index=True))
    first = run.manifest.data[0]
    run.manifest.data = [first.model_copy(update={"domain": name}) for name in ("a", "b")]
    assert draw(run, figure, "svg") == draw(run, figure, "svg", domain="a") != draw(run, figure, "svg", domain="b")
    with pytest.raises(SinkscopeError, match="--domain 'c': the run has a, b"):
        draw(run, figure, "svg", domain="c")


@pytest.mark.parametrize(
    ("lengths", "asked", "said"),
    [
        ([64, 128], None, "n = 64, 128, all from one pass"),
        ([64, 128], None, "It has 2 points because a scan measures 64, 128, 256, ... tokens unless --lengths"),
        ([12], None, "It shows one length because"),
        ([64, 128, 256], None, ""),
        ([8, 16], (8,), ""),
    ],
)
def test_the_caption_of_a_short_curve_says_how_to_measure_more(
    lengths: list[int], asked: tuple[int, ...] | None, said: str
) -> None:
    run = scanned()
    one = run.length_curve.drop_duplicates(["stream", "layer", "head"])
    run.length_curve = pd.concat([one.assign(length=length) for length in lengths], ignore_index=True)
    run.manifest.request = run.manifest.request.model_copy(update={"lengths": asked})
    told = caption(run, "length")
    assert said in told
    assert ("--lengths" in told) == (len(lengths) < 3 and asked is None)


def test_heads_of_one_length_stand_beside_each_other_and_name_themselves() -> None:
    run = scanned()
    assert run.length_curve["length"].nunique() == 1
    axes = draw_on(Figure().subplots(), run, "length")
    strongest = run.heads.sort_values("sink_score", ascending=False, kind="stable").head(6)
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == list(enumerate(strongest["sink_score"], 1))
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [f"{row.layer}.{row.head}" for row in strongest.itertuples()]
    assert axes.get_xlabel() == "head, 48 tokens"
    levels = {line.get_label(): set(line.get_ydata()) for line in axes.lines}
    assert levels["mean of all heads"] == {run.heads["sink_score"].mean()}
    assert "Bars: standard error" in caption(run, "length")


@pytest.mark.parametrize("size", slow_but(WIDTHS, "column"))
def test_a_heat_map_names_every_head_that_has_room_and_leaves_no_gap_above(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    from PIL import Image

    content = draw(enlarged(scanned(), 18, 4), "heatmap", "png", size)
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == ["0", "1", "2", "3"]
    image = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
    assert np.flatnonzero((image < 128).any(1))[0] <= 0.1 * 300, "a line of white above the title"


def test_the_thresholds_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    run = scanned()
    draw(run, "length", "png")
    draw(run, "scatter", "png")
    levels = [[line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"] for figure in drawn]
    assert levels == [[0.3], [0.4]]


@pytest.mark.parametrize(
    ("values", "log", "shown"),
    [([0.93326781, 0.93326785], False, ["0.90", "0.95"]), ([0.4346, 0.4352], True, ["0.42", "0.43", "0.44", "0.45"]),
     ([1.03, 1.13, 1.01], True, ["1", "1.05", "1.1", "1.15"]), ([0.1, 0.9], False, ["0.25", "0.50", "0.75"]),
     ([1.0, 20.0], True, ["$\\mathdefault{10^{0}}$", "$\\mathdefault{10^{1}}$"])],
)  # fmt: skip
def test_numbers_of_a_narrow_axis_are_written_out(values: list[float], log: bool, shown: list[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = Figure((3.35, 1.4))
    axes = canvas.subplots()
    axes.plot(values, marker="o")
    plain_axis(axes, log)
    FigureCanvasAgg(canvas).draw()
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert set(shown) <= {label.get_text() for label in axes.get_yticklabels()}


def test_a_token_of_a_blank_is_shown_as_one() -> None:
    assert [beside(token) for token in ("\u0120", "\u2581the", "<script>alert(1)")] == [
        "\u2018 \u2019",
        "the",
        "<script>aler",
    ]
