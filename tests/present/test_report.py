"""The HTML report: its data, escaping, size, no network, and access without a mouse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from arm_folders import write_arms
from desk import enlarged, hostile, scanned
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.cli.report import compared
from sinkscope.comparison.compare_runs import compare
from sinkscope.present.html.comparison import comparison_view
from sinkscope.present.html.head_data import head_data, spread, thinned
from sinkscope.present.html.page import embedded, unpacked
from sinkscope.present.html.report import render_report
from sinkscope.present.html.svg import Line, line_chart
from sinkscope.present.notebook import run_html
from sinkscope.present.terminal.run import render_run
from sinkscope.runs import catalogue
from sinkscope.runs.paper_table import describe_run
from sinkscope.runs.saved.arms import load_arms, placed
from sinkscope.runs.schema.summary import DomainSummary

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[1m\u2028"


class Page(HTMLParser):
    """Collects elements, the text of each script, and all other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def data_of(page: Page) -> Any:
    """The data of every run, with the curves of every head in their order."""
    scripts = {script.get("id"): text for script, text in zip(page.all("script"), page.scripts, strict=True)}
    kinds = {script.get("id"): script.get("type") for script in page.all("script")}
    runs = json.loads(unpacked(scripts["data"]) if kinds["data"] == "application/zlib" else scripts["data"])
    for run, blocks in zip(runs, json.loads(scripts["curves"]), strict=True):
        found = [json.loads(unpacked(block)) if isinstance(block, str) else block for block in blocks]
        run["curves"] = [head for block in found for head in block]
    return runs


def drawings_of(page: Page) -> list[dict[str, Any]]:
    """The charts of a large report, in their order."""
    (place,) = [place for place, script in enumerate(page.all("script")) if script.get("id") == "drawings"]
    drawings: list[dict[str, Any]] = json.loads(unpacked(page.scripts[place]))
    return drawings


def test_the_map_offers_the_columns_whose_declaration_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their places. A column that is declared tomorrow stands there without a change here."""
    run = scanned()
    before = data_of(Page(render_report([run])))[0]["scores"]
    assert before == [
        "bos_mass", "sink_score", "sink_rate", "sink_margin", "first_argmax", "entropy", "uniformity", "self_mass",
        "previous_mass", "honor", "residual_write_ln", "value_drain", "ov_drain", "gate_open", "pattern", "dormant",
    ]  # fmt: skip
    columns = [replace(each, map_place=0) if each.name == "tail_mass" else each for each in catalogue.catalogue()]
    monkeypatch.setattr(catalogue, "catalogue", lambda: tuple(columns))
    assert data_of(Page(render_report([run])))[0]["scores"] == ["tail_mass", *before]


def test_the_data_of_every_head() -> None:
    run = scanned()
    page = Page(render_report([run]))
    data = data_of(page)[0]
    assert data["scores"][:2] == ["bos_mass", "sink_score"]
    assert len(data["heads"]) == 12
    head = data["heads"][6]
    assert head["name"] == "layer 1 head 2"
    row = run.heads.iloc[6]
    assert head["scores"][0] == pytest.approx(row["bos_mass"], rel=5e-3)
    curves = data["curves"][6]
    assert curves["lengths"] == [48]
    assert curves["curve"][0] == pytest.approx(row["sink_score"], rel=5e-3)
    assert curves["positions"] == list(range(48))
    assert curves["alpha"][0] == pytest.approx(row["sink_score"], rel=5e-3)
    squares = [rect for rect in page.all("rect") if "data-head" in rect]
    assert sorted(int(str(rect["data-head"])) for rect in squares) == list(range(12))
    assert f"layer 1, head 2: first-token attention {row['bos_mass']:.4g}" in page.words
    assert run.summary.streams["text"].in_words[0] in page.words


def test_names_tokens_and_paths_stay_text() -> None:
    evil = hostile(scanned(), EVIL)
    text = render_report([evil, evil], compare(evil, evil))
    page = Page(text)
    assert len(page.scripts) == 4
    assert not page.all("img")
    assert "alert(1)" in page.words
    assert "\x1b" not in text
    assert "alert" not in page.scripts[-1]
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")}


def test_embedded_json_cannot_end_its_script() -> None:
    text = embedded({EVIL: [EVIL, float("nan"), np.float64("inf")]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {EVIL: [EVIL, None, None]}


def test_nothing_is_fetched_and_only_its_own_script_may_run() -> None:
    text = render_report([scanned()])
    page = Page(text)
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert not links
    assert "url(" not in text
    assert not any("style" in attributes for _, attributes in page.elements), "the policy would drop inline styles"


def test_hashes_are_those_of_the_elements() -> None:
    import base64
    import hashlib

    text = render_report([scanned()])
    for tag, source in (("style", "style-src"), ("script", "script-src")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{source} &#39;sha256-{digest}&#39;" in text


def test_keyboard_reaches_every_map_and_dark_is_known() -> None:
    text = render_report([scanned()])
    page = Page(text)
    reachable = [rect for rect in page.all("rect") if rect.get("tabindex") == "0"]
    assert len(reachable) == 1
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "ArrowRight" in page.scripts[-1]


@pytest.mark.slow
def test_a_thousand_heads_stay_under_five_megabytes() -> None:
    run = enlarged(scanned(), 32, 32)
    page = render_report([run, run], compare(run, run))
    assert len(page.encode()) < 5_000_000
    assert len(data_of(Page(page))[0]["heads"]) == 1024


@pytest.mark.slow
def test_changes_stand_with_q_and_those_within_noise_are_counted() -> None:
    run = scanned()
    result = compare(run, run)
    change = {"domain": "<i>", "layer": 1, "head": 2, "metric": "sink_score", "a": 0.2, "b": 0.45, "q": 0.003}
    result.changes["gained_sink"], result.within_noise["gained_sink"] = [change], [change] * 2
    text = render_report([run, run], result)
    assert (
        "1.2 on &lt;i&gt; (0.2 to 0.45, q 0.003); 2 more crossed the threshold without a difference that holds" in text
    )
    assert "</strong> none; " not in text
    del change["domain"]  # as it is where the runs have one domain
    assert "<strong>Gained a sink:</strong> 1.2 (0.2 to 0.45, q 0.003)" in render_report([run, run], result)


@pytest.mark.slow
def test_two_runs_have_one_scale() -> None:
    runs = [scanned(), scanned("noise", layers=4)]
    runs[1].layers["norm_other"] *= 1000
    runs[1].heads["honor"] *= 7
    page = Page(render_report(runs))
    axes = [re.findall(r'class="tick (?:end|mid)"[^>]*>([^<]*)<', chart) for chart in charts_of(runs)]
    half = len(axes) // 2
    assert half >= 5
    assert axes[:half] == axes[half:]
    alone = [re.findall(r'class="tick (?:end|mid)"[^>]*>([^<]*)<', chart) for chart in charts_of(runs[:1])]
    assert alone != axes[:half], "one run has its own scale"
    columns = [
        {name: (column["low"], column["high"]) for name, column in zip(run["scores"], run["columns"], strict=True)}
        for run in data_of(page)
    ]
    assert columns[0] == columns[1]


def test_each_further_answer_is_a_paragraph() -> None:
    run = scanned()
    run.summary.streams["text"].in_words[:] = ["No sink.", "No massive activation.", "Dormant: none."]
    assert "<p>No massive activation.</p>\n<p>Dormant: none.</p>" in render_report([run])


def test_answers_of_several_datasets_stand_below_their_names() -> None:
    run = scanned()
    streams = run.summary.streams
    words = {"prose": ["No sink.", "Dormant: none.", "Smoothing: all."], "code": ["A sink.", "Dormant: 1.0."]}
    run.summary.domains = {
        name: DomainSummary(streams={"text": streams["text"].model_copy(update={"in_words": said})})
        for name, said in words.items()
    }
    text = render_report([run])
    told = re.findall("<h4>.*?</h4>|<p>.*?</p>", text[text.index("<h3>More answers</h3>") :])[:5]
    assert told == [
        "<h4>prose</h4>", "<p>Dormant: none.</p>", "<p>Smoothing: all.</p>", "<h4>code</h4>", "<p>Dormant: 1.0.</p>",
    ]  # fmt: skip


def test_an_axis_of_one_value_begins_at_zero() -> None:
    chart = line_chart([Line("mass", [0.0], [0.096])], "layer", "probability")
    assert re.findall(r'class="tick end".*?>(.*?)<', str(chart)) == ["0", "0.05", "0.1"]
    for value, end in ((-0.03, "-0.03"), (0.0, "1"), (7.0, "8")):
        ticks = re.findall(r'class="tick end".*?>(.*?)<', str(line_chart([Line("", [0.0], [value])], "layer", "")))
        assert "0" in ticks
        assert end in ticks


def test_sentences_on_profiles_keep_the_names_of_columns() -> None:
    deep = enlarged(scanned(), 5, 4)
    said = comparison_view(compare(scanned(), deep, paired=False))["said"]
    assert [text.split(":")[0] for text in said][:2] == ["bos_mass", "sink_score"]
    assert said[-1].startswith(("Massive activations", "Tokens"))


def charts_of(runs: list[Any]) -> list[str]:
    return re.findall(r'<svg class="chart".*?</svg>', render_report(runs), re.DOTALL)


def test_the_letters_of_the_charts_are_explained() -> None:
    words = Page(render_report([scanned()])).words
    assert "alignment with the first token (x: residual stream; z: x after the norm)" in words
    assert "bos_mass, mean over heads" in words


def test_the_answer_and_the_maps_come_first() -> None:
    run = scanned()
    text = render_report([run, run], compare(run, run))
    places = [text.index(part) for part in (
        "From A to B: mean bos_mass", 'class="runs pair"', 'class="answer">No', 'id="heading-0"',
        "<h3>More answers</h3>",
        "What was measured",
        "<h3>Layers</h3>",
    ) if part in text]  # fmt: skip
    assert places == sorted(places)
    assert len(places) >= 5
    assert 'class="runs"' in render_report([run])


@pytest.fixture
def packs_every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a report of any size a large one."""
    monkeypatch.setattr("sinkscope.present.html.report.LARGE", 0)


@pytest.mark.slow
def test_thirteen_thousand_heads_stay_under_five_megabytes() -> None:
    text = render_report([enlarged(scanned(), 200, 64, sequences=1)])
    page = Page(text)
    assert len(text.encode()) < 5_000_000
    data = data_of(page)[0]
    assert len(data["heads"]) == len(data["curves"]) == 200 * 64
    drawing = drawings_of(page)[0]
    assert [point[2] for point in drawing["points"]] == list(range(200 * 64))
    assert drawing["svg"].count("<path") < 600, "one for each colour"
    assert not [rect for rect in page.all("rect") if "data-head" in rect]


@pytest.mark.usefixtures("packs_every_report")
def test_a_large_report_holds_what_a_small_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [scanned(), scanned("noise")]
    runs[0].heads.loc[2, "bos_mass"] = np.nan
    result = compare(*runs)
    large = Page(render_report(runs, result))
    monkeypatch.setattr("sinkscope.present.html.report.LARGE", 10**9)
    small = Page(render_report(runs, result))
    assert data_of(large) == data_of(small)
    drawings = drawings_of(large)
    places = [int(str(each["data-drawing"])) for each in large.all("div") if "data-drawing" in each]
    assert places == list(range(len(drawings)))
    shown = [title for drawing in drawings for *_, title in drawing["points"] if isinstance(title, str)]
    assert len(shown) == 2 * 12 - 1 + 12 * len(result.metrics), "dots of heads and squares of differences"
    assert [title for title in shown if title not in small.words] == []
    assert squares_of(drawings) == [
        (float(str(rect["x"])), float(str(rect["y"])), str(rect["fill"])) for rect in small.all("rect")
        if "y" in rect and "fill" in rect and rect["height"] != "12"
    ]  # fmt: skip


def squares_of(drawings: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Place and colour of every square of every map, in the order of the points."""
    found = []
    for drawing in drawings:
        if 'class="map"' not in drawing["svg"]:
            continue
        size = int(re.findall(r'data-size="(\d+)"', drawing["svg"])[0])
        fills = {
            place: fill
            for fill, squares in re.findall(r'<path fill="([^"]+)" d="([^"]+)"', drawing["svg"])
            for place in re.findall(rf"M(\d+) (\d+)h{size - 1}v{size - 1}h-{size - 1}z", squares)
        }
        places = [(44 + size * column, 16 + size * row) for column, row, _ in drawing["points"]]
        assert len(places) == len(fills)
        found += [(float(x), float(y), fills[str(x), str(y)]) for x, y in places]
    return found


@pytest.mark.usefixtures("packs_every_report")
def test_what_a_large_report_draws_is_escaped() -> None:
    evil = hostile(scanned(), EVIL)
    text = render_report([evil, evil], compare(evil, evil))
    page = Page(text)
    assert len(page.scripts) == 5
    for drawing in drawings_of(page):
        inside = Page(drawing["svg"])
        assert {tag for tag, _ in inside.elements} <= {"svg", "g", "rect", "circle", "path", "text", "title"}
        assert not [name for _, attributes in inside.elements for name in attributes if name.startswith("on")]


def test_long_texts_are_thinned_and_keep_their_peaks() -> None:
    alpha = np.full(4096, 1e-4)
    alpha[0], alpha[1777] = 0.5, 0.3
    positions, values = thinned(alpha)
    assert len(positions) <= 64
    assert values[positions.index(1777)] == 0.3
    assert positions == sorted(positions)
    assert thinned(alpha[:3])[0] == [0, 1, 2]
    alpha[100:] = np.nan
    positions, values = thinned(alpha)
    assert len(positions) == 64
    assert np.isnan(values[-1])


def test_weights_beyond_shares_keep_colours_of_their_own() -> None:
    """Attention that is no softmax has weights beyond 0 and 1."""
    run = scanned()
    run.heads.loc[run.heads.index[:2], "bos_mass"] = [2.0, 4.0]
    fills = re.findall(
        r'fill="(#\w+)" tabindex="-?\d" role="button" data-run="0" data-head="[01]"', render_report([run])
    )
    assert len(set(fills)) == 2
    column = head_data(run)["columns"][head_data(run)["scores"].index("bos_mass")]
    assert (column["low"], column["high"]) == (0.0, 4.0)


def test_missing_values_have_no_colour() -> None:
    run = scanned()
    run.heads.loc[0, "bos_mass"] = np.nan
    page = Page(render_report([run]))
    first = next(rect for rect in page.all("rect") if rect.get("data-head") == "0")
    assert first["fill"] == "none"
    assert "layer 0, head 0: first-token attention missing" in page.words


def test_a_domain_with_a_semicolon_is_named_whole() -> None:
    """The note is no error text that is cut at its first semicolon."""
    runs = [scanned(), scanned(text=1)]
    for run in runs:
        run.manifest.data[0].domain = "law; contracts.txt"
        run.sequences["domain"] = "law; contracts.txt"
    result = compared(*runs)
    assert not result.paired
    assert result.notes[0].startswith("not paired: the token sequences of 'law; contracts.txt' differ (")
    assert compared(runs[0], runs[0]).paired


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    scanned(text=1).save(tmp_path / "b")
    out = tmp_path / "r.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert "not paired" in text
    assert "From A to B" in text
    first = Page(text)
    assert len(data_of(first)) == 2


def test_tokens_and_switches_stand_where_a_run_has_them() -> None:
    run = scanned()
    run.tokens = None
    assert "Tokens that are sinks" not in render_report([run])
    token = {
        "stream": "text", "kind": "attention", "token": "<i>", "region": "text", "first": False, "sinks": 3,
        "occurrences": 8, "rate": 0.375, "heads": 2, "first_layer": 0, "last_layer": 1, "mean_alpha": 0.4,
        "sink_share": 1.0,
    }  # fmt: skip
    run.tokens = pd.DataFrame([token, token | {"kind": "massive"}])
    keys = run.heads[["stream", "layer", "head"]]
    run.measured["switch"] = keys.assign(sink_rows=0.5, sink_rows_sem=0.01, off_rate=0.25, switch_phi=np.nan)
    text = render_report([run])
    assert text.count("3 of 8") == 1, "attention sinks alone"
    assert "&lt;i&gt;" in text
    assert text.count("sink rows 0.5, off 0.25, phi missing") == 12
    data = data_of(Page(text))[0]
    place = data["scores"].index("sink_rows")
    assert (data["heads"][3]["scores"][place], data["heads"][3]["sems"][place]) == (0.5, 0.01)
    assert data["columns"][place]["what"]


def test_arms_stand_below_their_run(tmp_path: Path) -> None:
    """The one that costs most first; a control is no row of its own; names stay text."""
    run = scanned()
    assert "under interventions" not in render_report([run])
    folder = write_arms(tmp_path / "arms", run)
    text = render_report([run], None, placed([load_arms(folder)], [run]))
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text[text.index('class="nowrap arms"') :])
    assert [name for name, _ in rows] == ["keys:first1", "value:&lt;b&gt;1&lt;/b&gt;", "kv:4"]
    table = load_arms(folder).table.set_index("arm")
    first, control = table.loc["keys:first1"], table.loc["keys:random1"]
    cells = re.sub(r"<svg.*?</svg>|<span.*?</span>", "", rows[0][1])
    assert re.findall("<td>(.*?)</td>", cells)[:5] == [
        f"{first['increase']:+.4f}", f"{first['increase_low']:+.4f} to {first['increase_high']:+.4f}", "",
        f"{control['increase']:+.4f} ",
        f"{first['versus_random']:+.4f} ± {first['versus_random_sem']:.4f} ",
    ]  # fmt: skip
    assert f'<span class="soft">p {first["versus_random_p"]:.2g}</span>' in rows[0][1]
    assert "keys:random1 (2 draws)" in rows[0][1]
    assert "What the model loses under interventions: arms</h2>" in text, "several measurements may stand here"
    assert [drawing.count("<circle") for _, drawing in rows] == [2, 2, 1]
    page = Page(text)
    assert not page.all("b")
    assert "costs MORE than random" in page.words


def test_arms_without_an_increase_have_a_row_and_no_mark(tmp_path: Path) -> None:
    """Of all arms the losses are missing: the scale still ends somewhere, and no number is drawn."""
    run = scanned()
    text = render_report([run], None, placed([load_arms(write_arms(tmp_path / "arms", run, missing=5))], [run]))
    part = text[text.index('class="nowrap arms"') :]
    part = part[: part.index("</table>")]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', part)
    assert [name for name, _ in rows] == ["keys:first1", "value:&lt;b&gt;1&lt;/b&gt;", "kv:4"]
    assert "<circle" not in part
    assert "nan" not in part.lower()
    marks = re.findall(r'<text class="tick mid" x="([0-9.]+)" y="11">([^<]*)<', part)
    assert (marks[0], marks[-1]) == (("14.0", "0"), ("246.0", "1"))


def test_the_command_takes_arms_of_its_runs_alone(tmp_path: Path) -> None:
    run = scanned()
    run.save(tmp_path / "run")
    own = write_arms(tmp_path / "arms", run)
    foreign = write_arms(tmp_path / "foreign", run, id="other")
    words = ["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html"), "--arms"]
    refused = CliRunner().invoke(app, [*words, str(foreign)])
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "no run is of that model" in refused.stderr
    assert not (tmp_path / "r.html").exists()
    assert CliRunner().invoke(app, [*words, str(own)]).exit_code == 0
    assert "keys:first1" in (tmp_path / "r.html").read_text()


def test_every_score_has_its_error_and_what_it_means() -> None:
    run = scanned()
    data = data_of(Page(render_report([run])))[0]
    row, head = run.heads.iloc[6], data["heads"][6]
    for place, name in enumerate(data["scores"]):
        assert data["columns"][place]["what"], name
        error = row.get(f"{name}_sem")
        assert head["sems"][place] == (None if error is None else pytest.approx(error, rel=0.06)), name
    assert [data["columns"][data["scores"].index("pattern")][end] for end in ("low", "high")] == [None, None]
    assert [data["columns"][0][end] for end in ("low", "high")] == [0, 1]


def test_many_sequences_are_shown_by_their_quantiles() -> None:
    values = np.concatenate([np.linspace(0, 1, 101), [np.nan]])
    assert spread(values, 5) == [0, 0.25, 0.5, 0.75, 1]
    assert spread(values[:3][::-1], 5) == [0, 0.01, 0.02]
    assert spread(np.array([np.nan]), 5) == []


def test_two_runs_of_one_model_have_names_of_their_own() -> None:
    first, second = (scanned() for _ in range(2))
    second.manifest.model.dtype = "bfloat16"
    text = render_report([first, second])
    name = first.manifest.model.shown
    assert f"A: {name} (float32)</h2>" in text
    assert f"B: {name} (bfloat16)</h2>" in text


def test_an_interrupted_run_says_how_many_of_its_sequences_it_holds() -> None:
    run = scanned()
    done = run.sequences["sequence"].nunique()
    data = run.manifest.data[0]
    run.manifest.complete, run.manifest.data[0].sequences = False, done + 4
    said = f"{done} of {done + 4} sequences of {data.seq_len} tokens (interrupted)"
    screen = render_run(run)
    assert f"{data.domain}: {said}\ninterrupted: scan --resume measures the rest\n" in screen
    assert said in render_report([run])
    assert said in run_html(run)
    assert describe_run(run).endswith(f": {said} of {data.domain}")
    assert repr(run).startswith(
        f"<Run of {run.manifest.model.shown}, {done} x {data.seq_len} of {data.domain} (interrupted)"
    )
