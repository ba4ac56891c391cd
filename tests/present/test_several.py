"""Figures over several runs: drawn, the same twice, captioned, refused where a run lacks the table; maps' marks."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from desk import scanned, smoothed
from matplotlib.figure import Figure
from tiers import slow_but, thinned
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.cli.figures import _galleries, save
from sinkscope.cli.plot import SEVERAL, SINGLE, Style
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.attention_map import HeadMap
from sinkscope.present.figures.canvas import WIDTHS, Grid, drawn, headline, legend_below
from sinkscope.present.figures.lampert import PLAN, captions
from sinkscope.present.figures.maps import Pick, Tile, draw_attention, draw_gallery, gallery_heads, paint_map, sinks
from sinkscope.present.figures.run import _titled
from sinkscope.present.figures.several import all_series, by_layer, draw_several, measured, table_figures
from sinkscope.present.figures.trajectory import draw_trajectories, draw_trajectory
from sinkscope.present.html.report import render_report
from sinkscope.questions.smoothing.figure import paint_costs
from sinkscope.questions.smoothing.figure_heads import paint_parts, paint_theory, selected
from sinkscope.runs.questions import FIGURES
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.schema.manifest import FirstToken, Kind


def picture(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("L"))


@pytest.mark.slow
@pytest.mark.parametrize("figure", slow_but(table_figures(), "smoothing"))
def test_the_same_bytes_twice_with_text_as_text(figure: str) -> None:
    content, caption = draw_several([smoothed()], figure, "svg", "page")
    assert content == draw_several([smoothed()], figure, "svg", "page")[0]
    assert b"<text" in content
    assert b"layer" in content or figure == "costs"
    assert "3 sequences of 24 tokens" in caption


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("figure", thinned(table_figures(), 2))
def test_several_runs_fill_their_width_and_no_more(figure: str, size: str) -> None:
    """The outermost columns of pixels stay white: a legend or name that is too wide would run through them."""
    image = picture(draw_several([smoothed(), smoothed(1), smoothed(2)], figure, "png", size)[0])
    assert image.shape[1] == pytest.approx(300 * WIDTHS[size], abs=2)
    assert (image[:, :2] == 255).all()
    assert (image[:, -2:] == 255).all()


def test_a_name_that_the_scan_was_given_is_no_path() -> None:
    """Two runs named `step 1/2` and `step 2/2` were both `2` in a legend, a title and a caption."""
    runs = [scanned(), scanned()]
    for number, run in enumerate(runs, 1):
        run.manifest.model.name = f"step {number}/2"
    series = all_series(runs)
    assert [part.label for part in series] == ["step 1/2", "step 2/2"]
    assert measured(series).startswith("step 1/2 (float32): 8 sequences")
    assert _titled(runs[0], "text") == "step 1/2\ntext"
    assert ">step 1/2</h2>" in render_report(runs[:1])
    for run, name in zip(runs, ("org/one", "example:two"), strict=True):
        run.manifest.model.name, run.manifest.model.id = None, name
    assert [part.label for part in all_series(runs)] == ["one", "two"]
    runs[1].manifest.model.name = "example:two"
    assert all_series(runs)[1].label == "example:two"


def test_a_single_layer_has_one_number_below_it() -> None:
    axes = Figure().add_subplot()
    axes.plot([3], [0.5], marker="o")
    by_layer(axes)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [3]


@pytest.mark.parametrize("height", slow_but([1.58, 1.6, 1.62], 1.6))
def test_room_is_made_for_the_numbers_that_the_axes_have_in_the_end(height: float) -> None:
    """With a legend below them, panels are lower, and their axes may then have longer numbers: 0.25 in place of 0.2."""
    grid = Grid(("a",), 2, "column", height, "a title")

    def paint(canvas: Figure) -> None:
        panels = grid.panels(canvas)[0]
        for axes in panels:
            for name in ("one", "another"):
                axes.plot([0, 1], [0.2, 0.98], label=name)
            axes.set(xlabel="layer", ylabel="a name of\ntwo lines", ylim=(0, None))
        grid.share_layers([panels])
        legend_below(canvas, panels, 1)

    image = picture(drawn(paint, "a figure", "png", grid.inches, twice=True))
    assert (image[:, :2] == 255).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", slow_but(WIDTHS, "page"))
def test_nothing_is_cut_off_at_the_left_or_above(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, tops = [], []
    save = Figure.savefig

    def seen(canvas: Figure, *args: object, **options: object) -> None:
        save(canvas, *args, **options)
        edges.extend(axes.get_tightbbox().x0 for axes in canvas.axes)
        tops.extend(axes.get_ylim()[1] for axes in canvas.axes)

    monkeypatch.setattr(Figure, "savefig", seen)
    other = smoothed(1)
    other.measured["switch"] = other.measured["switch"].assign(communication=1.4, sink_rows=0.9)
    draw_several([smoothed(), other], "switch", "png", size)
    assert len(edges) == 4
    assert min(edges) >= 0
    assert max(tops) > 1.4


BEYOND = {
    "avgcos_residual": -0.9, "avgcos_identity": -0.9, "theory_identity": 1.0, "rank_output": 500.0,
    "cos_residual": -0.9, "cos_input": -0.9,
}  # fmt: skip
"""Values that the other run has not, each far below or above its own."""


@pytest.mark.parametrize("figure", slow_but(["cosine", "ranks", "parts", "theory", "alignment"], "cosine", "parts"))
@pytest.mark.parametrize("place", slow_but([0, 1], 1))
def test_no_series_is_cut_off_by_the_scale_of_another(figure: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of a part share their scales, whichever series is painted last."""
    seen: list[tuple[float, float, np.ndarray]] = []
    monkeypatch.setattr(Figure, "savefig", lambda canvas, *_, **__: seen.extend(
        (*axes.get_ylim(), np.concatenate([[np.nan], *(np.asarray(line.get_ydata(), float) for line in axes.lines)]))
        for axes in canvas.axes
    ))  # fmt: skip
    other = smoothed(1)
    other.sequences = other.sequences.assign(
        **{name: value for name, value in BEYOND.items() if name in other.sequences}
    )
    other.measured["alignment"] = other.measured["alignment"].assign(cos_residual=-0.9, cos_input=-0.9)
    runs = [smoothed()]
    runs.insert(place, other)
    draw_several(runs, figure, "png")
    assert len(seen) == 2 * table_figures()[figure].parts
    drawn_values = np.concatenate([values for *_, values in seen])
    assert np.nanmin(drawn_values) < -0.5 or np.nanmax(drawn_values) > 1.5
    for low, high, values in seen:
        known = np.append(values[~np.isnan(values)], (low + high) / 2)  # a panel may have none
        assert known.min() >= low - 1e-9, (low, known.min())
        assert known.max() <= high + 1e-9, (high, known.max())


def test_a_run_without_the_table_is_refused_with_the_remedy() -> None:
    for figure, measure in (("smoothing", "smoothing"), ("alignment", "switch"), ("switch", "switch")):
        with pytest.raises(SinkscopeError, match=f"scan it with --measure {measure}"):
            draw_several([smoothed(), scanned()], figure, "png")


@pytest.mark.slow
def test_cosines_that_a_run_lacks_are_left_out_and_none_is_refused() -> None:
    run = copy.deepcopy(smoothed())
    run.sequences["theory_residual"] = np.nan
    shown = draw_several([run], "cosine", "svg", "page")[0].decode()
    assert shown.count("theory") == 1, "of the second panel"
    run.sequences[["avg_cos_residual", "avg_cos_input", "avg_cos_output"]] = np.nan
    with pytest.raises(SinkscopeError, match=r"^tiny: no cosine of tokens was measured$"):
        draw_several([run], "cosine", "svg", "page")


def test_unknown_figures_and_sizes_are_refused() -> None:
    for figure, form, size in (("pie", "png", "column"), ("ranks", "gif", "column"), ("ranks", "png", "poster")):
        with pytest.raises(SinkscopeError):
            draw_several([smoothed()], figure, form, size)
    with pytest.raises(SinkscopeError, match="at least one run"):
        draw_several([], "ranks", "png")


def test_series_are_named_by_what_differs() -> None:
    one, other = scanned(), scanned(dtype="bfloat16")
    assert [each.label for each in all_series([one])] == ["tiny"]
    assert [each.label for each in all_series([one, other])] == ["float32", "bfloat16"]
    assert [each.label for each in all_series([one, one])] == ["tiny (1)", "tiny (2)"]
    other.manifest.model.id = "somebody/other"
    assert [each.label for each in all_series([one, other])] == ["tiny, float32", "other, bfloat16"]


@pytest.mark.parametrize(
    ("labels", "parts", "size", "shape"),
    [(1, 3, "column", (3, 1)), (1, 3, "page", (1, 3)), (2, 1, "column", (1, 2)), (3, 2, "column", (4, 2)),
     (5, 1, "page", (2, 4))],
)  # fmt: skip
def test_every_panel_has_a_place_of_its_own(labels: int, parts: int, size: str, shape: tuple[int, int]) -> None:
    grid = Grid(tuple(map(str, range(labels))), parts, size, 1.0, "")
    places = [grid.place(series, part) for series in range(labels) for part in range(parts)]
    assert grid.shape == shape
    assert len(set(places)) == len(places)
    assert all(row < shape[0] and column < shape[1] for row, column in places)


def test_a_title_is_replaced_or_left_out() -> None:
    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        axes.set_title("own", loc="left")
        axes.set_title("panel")
        headline(canvas, "above")

    words = {title: drawn(paint, "", "svg", (2, 2), title).decode() for title in (None, "none", "mine")}
    for title, shown in ((None, {"own", "above"}), ("none", set()), ("mine", {"mine"})):
        assert {word for word in ("own", "above", "mine") if f">{word}<" in words[title]} == shown
        assert ">panel<" in words[title]


# Maps


def causal(length: int, first: float = 0.0, own: float = 0.0) -> np.ndarray:
    """Uniform causal attention with mass moved to the first key and to the query itself."""
    rest = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    weights = (1 - first - own) * rest + own * np.eye(length)
    weights[:, 0] += first
    return weights


def test_sinks_are_keys_whose_alpha_exceeds_epsilon() -> None:
    assert sinks(causal(32, first=0.6), 0.3) == [0]
    assert sinks(causal(32), 0.3) == []
    flat = np.full((8, 8), 1 / 8)
    assert sinks(flat, 0.3) == []
    flat[:, 5] = 0.5
    assert sinks(flat, 0.3) == [5], "every query of an encoder may see key 5"


@pytest.mark.parametrize("name", ["sliding", "chunked"])
def test_a_sink_of_a_map_is_one_of_the_queries_that_see_it(name: str) -> None:
    weights = np.eye(64)
    for query in range(9, 16):
        weights[query, [8, query]] = 0.6, 0.4
    assert sinks(weights, 0.5, Kind(name=name, size=8)) == [8]
    assert sinks(weights, 0.5) == []


@pytest.mark.parametrize("size", [8, 9])
def test_a_window_both_ways_reaches_as_far_as_its_map(size: int) -> None:
    """T5Gemma names the 8 keys on each side, ModernBERT those and the query's own."""
    apart = abs(np.subtract.outer(np.arange(64), np.arange(64)))
    weights = np.where(apart <= 8, 1 / 17, 0)
    weights[22:39, 30] = 0.2
    assert sinks(weights, 0.15, Kind(name="sliding", size=size)) == [30]
    assert sinks(weights, 0.25, Kind(name="sliding", size=size)) == []


@pytest.mark.parametrize(
    ("tile", "marks"),
    [(Tile("", causal(32, first=0.6)), {"sink"}), (Tile("", causal(32, own=0.7)), {"diagonal"}),
     (Tile("", causal(32, first=0.6), trigger=7), {"sink", "trigger"}),
     (Tile("", causal(32, first=0.6), trigger=7, marked=False), {"trigger"})],
)  # fmt: skip
def test_a_map_marks_what_it_has(tile: Tile, marks: set[str]) -> None:
    axes = Figure().subplots()
    image = paint_map(axes, tile, 1.0, 0.3)
    assert set(axes.get_legend_handles_labels()[1]) == marks
    assert axes.get_aspect() == 1, "cells are square"
    assert image.get_array().mask.sum() == 32 * 31 / 2, "what a causal head cannot see is left white"


def test_an_encoders_map_is_shown_whole() -> None:
    image = paint_map(Figure().subplots(), Tile("", np.full((8, 8), 1 / 8)), 1.0, 0.3)
    assert not image.get_array().mask.any()


@pytest.mark.slow
def test_attention_at_several_lengths_and_a_gallery() -> None:
    run = scanned()
    tokens = ["<bos>", "$a_", "語", "\x1b[1m", *map(str, range(12))]
    maps = [HeadMap(1, 2, causal(length, first=0.5), tokens[:length]) for length in (4, 16)]
    content, caption = draw_attention(run, maps, "a text", "svg", "page")
    assert content == draw_attention(run, maps, "a text", "svg", "page")[0]
    assert b"T = 4" in content
    assert b"\x1b" not in content
    assert "the first 4, 16 tokens of the text 'a text'" in caption
    heads = gallery_heads(run)
    assert len({(layer, head) for layer, head, _ in heads}) == len(heads) == 4
    assert heads[0][2].startswith("first token "), "the run had no tokenizer that names a BOS"
    run.summary.first_token = FirstToken(id=1, text="<bos>", distinct=1, is_bos=True)
    assert gallery_heads(run)[0][2].startswith("BOS ")
    assert len(set(gallery_heads(run, 2))) == 8
    own = [HeadMap(layer, head, causal(16), tokens) for layer, head, _ in heads]
    content, caption = draw_gallery([(run, own), (run, own)], "a text", "svg")
    assert content == draw_gallery([(run, own), (run, own)], "a text", "svg")[0]
    assert "'a text'" in caption


@pytest.mark.slow
def test_a_run_with_fewer_maps_than_another_leaves_places_empty() -> None:
    """A score that no head of the second run has: its row ends early, and all marks are still drawn."""
    run, other = scanned(), scanned(text=1)
    other.heads["uniformity"] = np.nan
    maps = [
        (each, [HeadMap(layer, head, causal(4), [*"abcd"]) for layer, head, _ in gallery_heads(each)])
        for each in (run, other)
    ]
    assert [len(own) for _, own in maps] == [4, 3]
    content = draw_gallery(maps, "a text", "svg")[0].decode()
    assert content.count(">head ") == 7, "a name above each map"
    assert content.count(">tiny<") == content.count(">query<") == 2, "the model's name beside each row"
    assert content.count(">key<") == 4, "below the last map of each column"


def with_rows(**columns: list[float]) -> Run:
    """The run of eight heads with these columns in switch.csv."""
    run = copy.deepcopy(smoothed())
    run.measured["switch"] = run.measured["switch"].assign(**columns)
    return run


ROWS = {
    "sink_rows": [0.9, 0.2, 0.6, 0.0, 0.5, 0.96, 0.3, 0.1], "self_rows": [0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0, 0.0],
    "copy_rows": [0.06, 0.2, 0.3, 0.2, 0.5, 0.04, 0.2, 0.2],
}  # fmt: skip


def test_a_class_of_heads_is_picked_by_its_rows() -> None:
    """The share of rows that rest or copy decides; a head without enough rows of either kind is none of the class."""
    run = with_rows(**ROWS)
    assert gallery_heads(run, pick=Pick("sink+copy")) == [
        (1, 0, "0.50 + 0.50"), (0, 0, "0.90 + 0.06"), (0, 2, "0.60 + 0.30"), (1, 2, "0.30 + 0.20"),
    ]  # fmt: skip
    assert gallery_heads(run, pick=Pick("diagonal+copy")) == [(0, 3, "0.70 + 0.20")]
    with pytest.raises(SinkscopeError, match=r"no head is near to diagonal\+copy"):
        gallery_heads(with_rows(**ROWS | {"self_rows": [0.0] * 8}), pick=Pick("diagonal+copy"))
    with pytest.raises(SinkscopeError, match="scan it with --measure switch"):
        gallery_heads(scanned(), pick=Pick("sink+copy"))


def test_heads_at_random_are_the_seed_s() -> None:
    run = smoothed()
    drawn = [gallery_heads(run, pick=Pick("random", seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len({(layer, head) for layer, head, _ in each}) for each in drawn] == [4, 4, 4]
    known = {(row.layer, row.head): row.pattern for row in run.heads.itertuples()}
    assert all(known[layer, head] == pattern for layer, head, pattern in drawn[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pick", "sinks"), "--pick 'sinks': choose one of clearest, random"),
        (("--seed", 1), "--seed goes with --pick random"),
        (("--pick", "random", "--seed", -1), "a seed is 0 or more"),
    ],
)
def test_what_picks_no_heads_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    code, _, err = run_cli("plot", tmp_path / "run", "--figure", "gallery", *words, "-o", tmp_path / "g.svg")
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_a_run_without_costs_is_left_out_and_named() -> None:
    bare, old = copy.deepcopy(smoothed(1)), copy.deepcopy(smoothed(2))
    bare.manifest.model.id, old.manifest.model.id = "bare", "old"
    bare.measured["smoothing"]["cost_sink_upper_qk"] = np.nan
    del old.measured["smoothing"]["cost_sink_upper_qk"]
    content, told = draw_several([smoothed(), bare, old], "costs", "svg")
    assert b"bare" not in content
    assert "tiny (float32)" in told
    assert "Left out: bare: no head's first token leads every other key" in told
    assert "; old: an older sinkscope wrote this run" in told
    assert "Left out" not in draw_several([smoothed()], "costs", "svg")[1]
    with pytest.raises(SinkscopeError, match="bare: no head's first token leads"):
        draw_several([bare], "costs", "svg")


@pytest.mark.parametrize("heads", [1, 8])
def test_heads_with_costs_are_counted_in_whole_numbers(heads: int) -> None:
    run = copy.deepcopy(smoothed())
    run.measured["smoothing"].loc[heads:, "cost_sink_upper_qk"] = np.nan
    (series,) = all_series([run])
    axes = Figure().subplots()
    paint_costs(series, [axes], True)
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


# Figures of chosen heads


def test_the_second_panel_shows_uniform_heads_alone() -> None:
    """Of layer 1 no head is uniform enough, so that the lines have no mark there."""
    run = copy.deepcopy(smoothed())
    is_head = run.sequences["head"].notna()
    run.sequences.loc[is_head, "uniformity"] = np.where(run.sequences.loc[is_head, "layer"] == 0, 0.7, 0.5)
    run.sequences.loc[is_head & (run.sequences["head"] == 0), "uniformity"] = 0.1
    (series,) = all_series([run])
    panels = list(Figure().subplots(2))
    paint_parts(series, panels, True)
    whole, uniform = (panel.lines[1].get_ydata() for panel in panels)
    table = run.sequences[is_head]
    for found, rows in ((whole, table), (uniform, table[table["uniformity"] > 0.6])):
        first = rows[rows["layer"] == 0].groupby("sequence")["avgcos_identity"].mean().mean()
        assert found[0] == pytest.approx(first)
    assert np.isnan(uniform).tolist() == [False, True]
    run.sequences["uniformity"] = 0.1
    panels = list(Figure().subplots(2))
    paint_parts(series, panels, True)
    assert [text.get_text() for text in panels[1].texts] == ["no head"]


def test_the_theory_s_error_is_a_mean_of_absolute_differences() -> None:
    """Differences of both signs do not cancel."""
    run = copy.deepcopy(smoothed())
    signs = np.where(run.sequences["sequence"] % 2, 0.1, -0.1)
    run.sequences["theory_identity"] = run.sequences["avgcos_identity"] + signs
    (series,) = all_series([run])
    (axes,) = panels = [Figure().subplots()]
    paint_theory(series, panels, True)
    assert axes.lines[1].get_ydata() == pytest.approx([0.1, 0.1])
    run.sequences[["theory_identity", "theory_residual"]] = np.nan
    with pytest.raises(SinkscopeError, match="no theoretical cosine"):
        paint_theory(series, [Figure().subplots()], True)


def test_selected_heads_are_the_farthest_from_uniform_of_each_condition() -> None:
    table = pd.DataFrame({
        "layer": 0, "head": range(6), "verdict": ["smooths", "smooths", "smooths", "neither", None, "sharpens"],
        "uniform_minus_attention": [0.1, -0.3, 0.2, 0.05, 0.9, np.nan],
    })  # fmt: skip
    assert selected(table)["head"].tolist() == [1, 2, 3]


# Trainings


def trained(seed: int) -> pd.DataFrame:
    heads = [
        {"step": step, "domain": "prose", "stream": "text", "level": "head", "layer": layer, "head": head,
         "metric": "sink_score", "value": 0.01 * step * (head + seed), "sem": 0.01}
        for step in (0, 10, 20) for layer in (0, 1) for head in range(4)
    ]  # fmt: skip
    table = pd.DataFrame(heads)
    model = table.groupby("step", as_index=False)["value"].mean().assign(level="model", metric="sink_score", sem=0.01)
    return pd.concat([table, model.assign(domain="prose", stream="text")], ignore_index=True)


@pytest.mark.slow
def test_trainings_beside_each_other() -> None:
    both = {"one": trained(1), "two": trained(2)}
    content, caption = draw_trajectories(both, "svg")
    assert content == draw_trajectories(both, "svg")[0]
    assert b">two<" in content
    assert "standard error" in caption


@pytest.mark.slow
def test_one_training_is_drawn_as_track_draws_it() -> None:
    content, caption = draw_trajectories({"one": trained(1)}, "svg")
    assert content == draw_trajectory(trained(1), "svg")
    assert b">one<" not in content, "a name tells panels apart, and there is one"
    assert "standard error" in caption


@pytest.mark.slow
def test_the_caption_names_the_dataset_where_a_training_has_several() -> None:
    both = pd.concat([trained(1), trained(2).assign(domain="code")])
    assert draw_trajectories({"one": both}, "svg")[1].endswith("Drawn: prose, stream text.")
    assert "Drawn" not in draw_trajectories({"one": trained(1)}, "svg")[1]


@pytest.mark.slow
def test_the_command_draws_trainings_by_their_folders(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two", "a/one"), 1):
        (tmp_path / name).mkdir(parents=True)
        trained(number).to_csv(tmp_path / name / "trajectory.csv", index=False)
    words = ("--figure", "trajectory", "-o", tmp_path / "t.svg")
    code, out, err = run_cli("plot", tmp_path / "one", tmp_path / "two", *words)
    assert code == 0, err
    assert "standard error" in out
    drawn = (tmp_path / "t.svg").read_bytes()
    assert b">two<" in drawn
    assert b">head 1.3<" in drawn, "layers and heads are whole numbers, as track draws them"
    code, _, err = run_cli("plot", tmp_path / "one", tmp_path / "a" / "one", *words)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "two folders have the same name: rename one" in err
    whole = (tmp_path / "one" / "trajectory.csv").read_text()
    first = whole.splitlines()[1]
    for text, said in (
        ("step,mine\n1,2\n", "is no trajectory of `sinkscope track`"),
        (whole.splitlines()[0] + "\n", "is no trajectory of `sinkscope track`"),
        (whole[: len(whole) // 2].rstrip("\n"), "is cut off: run `sinkscope track` again"),
        (whole.replace(first, "one" + first[first.index(",") :]), "no table, or a damaged one"),
    ):
        (tmp_path / "two" / "trajectory.csv").write_text(text)
        code, _, err = run_cli("plot", tmp_path / "two", *words)
        assert (code, len(err.splitlines())) == (2, 1)
        assert str(tmp_path / "two" / "trajectory.csv") in err
        assert said in err


# The commands


def test_every_figure_has_its_place_in_the_command() -> None:
    assert {*table_figures(), "gallery", "trajectory"} == set(SEVERAL)
    assert not set(SEVERAL) & set(SINGLE)
    assert set(FIGURES) == {*SEVERAL, *SINGLE} - set(table_figures()), "no question may take one of these names"
    assert {each.figure for each in PLAN} == {*table_figures(), "gallery"}
    assert len({each.stem for each in PLAN}) == len(PLAN)
    numbers = {number for each in PLAN for number in each.numbers.split(", ") if number}
    assert numbers == {*map(str, range(1, 14)), "E.3"}


def test_what_is_not_drawn_is_told_with_its_reason() -> None:
    page = captions({"lampert-12-ranks.pdf": "Ranks."}, {"lampert-03-costs": "the run has no table smoothing"})
    assert "## Figure 12: lampert-12-ranks.pdf\n\nRanks.\n" in page
    assert "## Figure 3\n\nNot drawn: the run has no table smoothing.\n" in page
    assert "## Figure 2, right\n\nNot drawn: " in page
    assert page.index("## Figure 7") < page.index("## Figures 8, 9, 10") < page.index("## Figure 11")
    assert "## Figure E.3, sink+copy\n\nNot drawn: " in page


def run_cli(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def test_plot_prints_the_caption_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    code, out, err = run_cli(
        "plot", tmp_path / "run", "--figure", "scatter", "-o", tmp_path / "s.svg", "--title", "none"
    )
    assert code == 0, err
    assert out.startswith("First-token attention against HONOR")
    assert b"tiny" not in (tmp_path / "s.svg").read_bytes().partition(b"</metadata>")[2]
    for arguments, message in (
        (("--figure", "ranks"), "has no table smoothing: scan it with --measure smoothing"),
        (("--figure", "heatmap", tmp_path / "run"), "--figure heatmap shows one run"),
        (("--figure", "trajectory"), "`sinkscope track` writes it"),
        (("--figure", "pie"), "choose one of heatmap"),
    ):
        code, _, err = run_cli("plot", tmp_path / "run", *arguments, "-o", tmp_path / "f.png")
        assert code == 2
        assert message in err
    assert not (tmp_path / "f.png").exists()


@pytest.mark.slow
def test_all_figures_of_a_paper(tmp_path: Path) -> None:
    smoothed().save(tmp_path / "run")
    code, out, err = run_cli(
        "figures", "lampert", tmp_path / "run", "-o", tmp_path / "all", "--no-maps", "--format", "svg"
    )
    assert code == 0, err
    written = {Path(line).name for line in out.splitlines()}
    assert {"lampert-12-ranks.svg", "lampert-08-09-10-smoothing.svg", "captions.md"} <= written
    assert {"lampert-02-parts.svg", "lampert-07-theory.svg", "lampert-11-selected.svg"} <= written
    assert {path.name for path in (tmp_path / "all").iterdir()} == written
    scanned().save(tmp_path / "plain")
    code, _, err = run_cli("figures", "lampert", tmp_path / "plain", "-o", tmp_path / "none", "--no-maps")
    assert code == 2
    assert "no figure can be drawn" in err
    assert not (tmp_path / "none").exists()


def test_figures_that_lack_the_same_table_share_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def drawn(runs: object, figure: str, *rest: object) -> tuple[bytes, str]:
        if figure == "alignment":
            return b"figure", "caption"
        raise SinkscopeError(f"no table {'switch' if figure == 'switch' else 'smoothing'}")

    monkeypatch.setattr("sinkscope.cli.plot.of_tables", drawn)
    scanned().save(tmp_path / "run")
    code, _, err = run_cli("figures", "lampert", tmp_path / "run", "-o", tmp_path / "all", "--no-maps")
    assert code == 0, err
    smoothing, switch = (line for line in err.splitlines() if "not drawn" in line)
    assert smoothing.startswith("sinkscope: not drawn: lampert-02-04-05-06-cosine, lampert-02-parts, ")
    assert switch == "sinkscope: not drawn: lampert-switch: no table switch"


@pytest.mark.slow
def test_galleries_of_a_paper_load_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of which the run has no head is told, and the other galleries are drawn."""
    asked = []

    def maps_of(run: Run, text: str, heads: list[tuple[int, int]], lengths: list[int], trust: bool) -> list[HeadMap]:
        asked.append(heads)
        return [HeadMap(layer, head, causal(8), [*"abcdefgh"]) for layer, head in heads]

    monkeypatch.setattr("sinkscope.cli.plot.maps_of", maps_of)
    refused: dict[str, str] = {}
    run = with_rows(**ROWS | {"self_rows": [0.0] * 8})
    drawn = _galleries([run], "a text", False, Style("svg", "page", None), refused)
    assert list(drawn) == ["lampert-13-gallery-random.svg", "lampert-E.3-gallery-sink-and-copy.svg"]
    assert list(refused) == ["lampert-E.3-gallery-diagonal-and-copy"]
    (heads,) = asked
    assert len(heads) == len(set(heads))
    content, caption = drawn["lampert-E.3-gallery-sink-and-copy.svg"]
    assert content.decode().count(">head ") == 4
    assert "0.50 + 0.50" in content.decode()
    assert "The heads with the largest share of rows that either give the first token 0.9 or more or copy" in caption
    assert "drawn at random (seed 0)" in drawn["lampert-13-gallery-random.svg"][1]


@pytest.mark.slow
def test_a_gallery_reads_the_text_with_the_run_s_own_model(tiny_folder: Path, tmp_path: Path) -> None:
    sinkscope.scan(str(tiny_folder), seq_len=32, num_sequences=2, self_check=False).save(tmp_path / "run")
    words = ("--figure", "gallery", "--text", "A short text of a few words.", "-o", tmp_path / "g.svg")
    code, out, err = run_cli("plot", tmp_path / "run", *words)
    assert code == 0, err
    assert "the maps are of the text 'A short text of a few words.'" in out
    names = [f"head {layer}.{head}" for layer, head, _ in gallery_heads(load_run(tmp_path / "run"))]
    assert len(names) == 4
    assert all(name in (tmp_path / "g.svg").read_text() for name in names)


def test_figures_refuse_what_they_cannot_draw(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    scanned().save(tmp_path / "run")
    for words, message in (
        (("trigger", "example:trigger-relu", "--inputs", 0), "--inputs 0: at least 1 is needed"),
        (
            ("trigger", "example:trigger-relu", "--inputs", 9, "--num-sequences", 8),
            "--inputs 9: at most the 8 of --num-sequences can be drawn",
        ),
        (("trigger", "example:trigger-relu", "--title", "mine"), "--title 'mine': own or none"),
        (("lampert", tmp_path / "run", "--title", "mine"), "one title cannot fit all figures"),
    ):
        code, out, err = run_cli("figures", *words, "-o", tmp_path / "all")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err
    assert not (tmp_path / "all").exists()
    for words in (("trigger", "example:trigger-relu"), ("lampert", tmp_path / "run")):
        code, out, err = run_cli("figures", *words, "-o", tmp_path / "file")
        assert (code, out) == (2, "")
        assert err == f"sinkscope: error: {tmp_path / 'file'} is a file: give another --out\n"
    with pytest.raises(SinkscopeError, match=r"^cannot write into .*/file/all: Not a directory$"):
        save(tmp_path / "file" / "all", {}, captions)


@pytest.mark.slow
def test_trigger_maps_side_by_side(tmp_path: Path) -> None:
    code, out, err = run_cli(
        "figures", "trigger", "example:trigger-softmax", "example:trigger-relu", "-o", tmp_path / "t",
        "--format", "svg", "--num-sequences", 20, "--length", 12, "--length", 16,
    )  # fmt: skip
    assert code == 0, err
    assert len(out.splitlines()) == 7
    page = (tmp_path / "t" / "captions.md").read_text()
    assert "softmax beside relu" in page
    mean = next((tmp_path / "t").glob("*T12-mean.svg")).read_bytes()
    assert b"softmax 0.0" in mean
    assert b"relu 0.0" in mean


@pytest.mark.parametrize("layers", [1, 3])
def test_the_cosines_of_a_single_layer_are_marked(layers: int) -> None:
    """A line through one point is no ink."""
    from matplotlib.figure import Figure

    from sinkscope.questions.switch.figure import paint_alignment

    rows = pd.DataFrame({"layer": np.repeat(range(layers), 5), "position": [*range(5)] * layers})
    rows = rows.assign(cos_residual=0.5, cos_input=0.25)
    panels = list(Figure().subplots(2))
    paint_alignment(SimpleNamespace(rows=lambda table: rows), panels, True)  # type: ignore[arg-type]
    marks = [line.get_marker() for line in panels[0].lines if line.get_label() == "mean"]
    assert marks == ["." if layers == 1 else "None"]
