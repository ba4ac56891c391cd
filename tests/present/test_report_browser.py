"""The HTML report in headless Chromium: keyboard, dark colour scheme, print, hostile names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from math import floor, log10
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from arm_folders import write_arms
from browser import CHROMIUM, Browser
from desk import enlarged, hostile, scanned

from sinkscope.comparison.compare_runs import compare
from sinkscope.experiments.attention_map import HeadMap
from sinkscope.present.colors import CIVIDIS
from sinkscope.present.html.attention import AttentionMaps
from sinkscope.present.html.page import unpacked
from sinkscope.present.html.report import render_report
from sinkscope.runs.catalogue import catalogue
from sinkscope.runs.run import Run
from sinkscope.runs.saved.arms import load_arms, placed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (chromium, google-chrome on PATH)")

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
FOCUSED = "document.activeElement.dataset.head"
HEADLINE = "document.querySelector('#detail-0 h4')?.textContent"
FILLS = "[...document.querySelectorAll('rect[data-run=\"0\"]')].map(cell => cell.getAttribute('fill'))"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def written(folder: Path, *runs: Run) -> Path:
    path = folder / "report.html"
    result = compare(*runs) if len(runs) == 2 else None
    path.write_text(render_report(list(runs), result), encoding="utf-8")
    return path


def test_the_keyboard_opens_a_head(browser: Browser, tmp_path: Path) -> None:
    run = scanned()
    browser.open(written(tmp_path, run))
    strongest = run.heads.loc[run.heads["bos_mass"].idxmax()]
    assert browser.get(HEADLINE) == f"layer {strongest['layer']} head {strongest['head']}", "open from the start"
    for _ in range(5):
        browser.press("Tab")
        if browser.get(FOCUSED) is not None:
            break
    assert browser.get(FOCUSED) == "0"
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert browser.get(FOCUSED) == "5"
    browser.press("Enter")
    assert browser.get(HEADLINE) == "layer 1 head 1"
    assert browser.get("document.querySelector('rect.chosen').dataset.head") == "5"
    shown = browser.get("document.querySelector('#detail-0 table').rows[0].innerText").split()
    row = run.heads.loc[5]
    assert shown == ["bos_mass", *equal_decimals(row["bos_mass"], row["bos_mass_sem"]).split()]
    points = browser.get("document.querySelectorAll('#detail-0 svg')[1].querySelectorAll('circle').length")
    assert points == 48, "alpha of every key position"
    browser.press("Tab")
    assert browser.get(FOCUSED) is None, "one stop for the whole map"


def equal_decimals(mean: float, error: float) -> str:
    """The mean's three digits or the error's two, whichever end first, written as the page does."""
    places = min(2 - floor(log10(abs(mean))), 1 - floor(log10(error)))
    return f"{mean:.{places}f} ± {error:.{places}f}"


def test_a_mean_and_its_error_have_equal_decimals(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    script = (files("sinkscope") / "present" / "html" / "templates" / "charts.js").read_text("utf-8")
    page.write_text(f'<!doctype html><meta charset="utf-8"><script>{script}</script>', encoding="utf-8")
    browser.open(page)
    shown = {
        "4, 0.12": "4.00 ± 0.12", "1, 0.0078": "1.00 ± 0.01", "0, 0.0033": "0.0000 ± 0.0033",
        "-2.36, 0.45": "-2.36 ± 0.45", "102000, 310": "102000 ± 310", "5e-9, 2e-9": "5e-9 ± 2e-9",
        "1, 0": "1 ± 0", "0.4, null": "0.4", "null, null": "missing", "'sink', null": "sink",
    }  # fmt: skip
    assert browser.get(f"[{', '.join(f'withError({each})' for each in shown)}]") == list(shown.values())


def choose(browser: Browser, column: str) -> None:
    browser.get(
        "(field => { field.value = [...field.options].find(each => each.text === '" + column + "').value; "
        "field.dispatchEvent(new Event('change')); })(document.querySelector('#choose-0 select'))"
    )


@pytest.mark.slow
def test_the_map_shows_any_score(browser: Browser, tmp_path: Path) -> None:
    run = scanned()
    run.heads.loc[3, "entropy"] = np.nan
    browser.open(written(tmp_path, run))
    before = browser.get(FILLS)
    choose(browser, "entropy")
    assert browser.get("document.getElementById('heading-0').textContent") == "entropy of every head"
    fills = browser.get(FILLS)
    assert fills[int(run.heads["entropy"].argmax())] == CIVIDIS[-1]
    assert fills[int(run.heads["entropy"].argmin())] == CIVIDIS[0]
    assert fills[3] == "none"
    row = run.heads.loc[5]
    title = browser.get("document.querySelector('rect[data-head=\"5\"] title').textContent")
    assert title == f"layer 1, head 1: entropy {equal_decimals(row['entropy'], row['entropy_sem'])}"
    formula = next(each.formula for each in catalogue() if (each.table, each.name) == ("heads", "entropy"))
    assert browser.get("document.querySelector('#choose-0 output').textContent") == formula
    assert "entropy (nats)" in browser.get("document.querySelector('#maps-0 .legend').textContent")
    choose(browser, "bos_mass")
    assert [one == other for one, other in zip(browser.get(FILLS), before, strict=True)].count(True) >= 10, (
        "to the three digits that the page holds"
    )


@pytest.mark.slow
def test_a_head_shows_its_errors_its_sequences_and_what_its_scores_mean(browser: Browser, tmp_path: Path) -> None:
    run = scanned()
    run.positions["token"] = run.positions["token"].where(run.positions["position"] > 0, EVIL)
    browser.open(written(tmp_path, run))
    assert browser.get("document.querySelectorAll('#detail-0 .sequence').length") == 8
    values = [float(value) for value in browser.get(
        "[...document.querySelectorAll('#detail-0 .sequence title')].map(each => each.textContent)"
    )]  # fmt: skip
    strongest = run.heads.loc[run.heads["bos_mass"].idxmax()]
    rows = run.sequences[(run.sequences["layer"] == strongest["layer"]) & (run.sequences["head"] == strongest["head"])]
    assert values == pytest.approx(sorted(rows["sink_score"]), rel=5e-3)
    assert browser.get("document.querySelectorAll('#detail-0 .error').length") >= 2, "of the curve, and of the mean"
    assert "Mean over queries i = 1..T-1 of A[i,0]" in browser.get("document.querySelector('#detail-0 th').title")
    first = browser.get("document.querySelectorAll('#detail-0 svg')[1].querySelector('circle title').textContent")
    assert first.startswith(f"key position 0 '{EVIL}': ")
    assert browser.get("document.images.length") == 0


@pytest.mark.slow
def test_all_heads_are_sorted_and_searched(browser: Browser, tmp_path: Path) -> None:
    run = scanned()
    browser.open(written(tmp_path, run))
    assert browser.get("document.querySelectorAll('#all-0 tr').length") == 0, "built when it is opened"
    browser.get("document.getElementById('all-0').open = true")
    browser.wait("document.querySelectorAll('#all-0 tbody tr').length === 12")
    names = "[...document.querySelectorAll('#all-0 tbody th')].map(cell => cell.textContent)"
    order = run.heads.sort_values("bos_mass", ascending=False)
    assert browser.get(names)[:3] == [f"layer {r['layer']} head {r['head']}" for _, r in order.head(3).iterrows()]
    browser.get("[...document.querySelectorAll('#all-0 button')].find(each => each.textContent === 'entropy').click()")
    top = run.heads.loc[run.heads["entropy"].idxmax()]
    assert browser.get(names)[0] == f"layer {top['layer']} head {top['head']}"
    bound = float(run.heads["bos_mass"].median())
    browser.get(f"document.querySelector('#all-0 input').value = 'layer bos_mass>{bound:.6f}'")
    browser.get("document.querySelector('#all-0 input').dispatchEvent(new Event('input'))")
    assert browser.get("document.querySelector('#all-0 output').textContent") == "6 of 6 heads"
    browser.get("document.querySelector('#all-0 tbody a').click()")
    browser.wait(f"{HEADLINE} === document.querySelector('#all-0 tbody a').textContent")


@pytest.mark.slow
def test_an_address_opens_its_head(browser: Browser, tmp_path: Path) -> None:
    browser.said.clear()
    browser.open(written(tmp_path, scanned(), scanned("noise")))
    browser.get("location.hash = '#1=' + encodeURIComponent('layer 2 head 3')")
    browser.wait("document.querySelector('#detail-1 h4').textContent === 'layer 2 head 3'")
    browser.reload()
    browser.wait("document.querySelectorAll('rect.chosen').length === 2")
    assert browser.get("document.querySelector('#detail-1 h4').textContent") == "layer 2 head 3"
    assert browser.get("document.querySelector('#detail-1 a').getAttribute('href')") == "#1=layer%202%20head%203"
    for nothing in ("#7=layer%200%20head%200", "#0=nobody", "#0=%zz", "#other"):
        browser.get(f"location.hash = {nothing!r}")
    assert browser.get("document.querySelector('#detail-1 h4').textContent") == "layer 2 head 3"
    assert not browser.said


def test_names_and_tokens_stay_text(browser: Browser, tmp_path: Path) -> None:
    evil = hostile(scanned(), EVIL)
    browser.open(written(tmp_path, evil, evil))
    assert browser.get("document.title").startswith("Attention sinks: ")
    assert browser.get("document.scripts.length") == 4
    assert browser.get("document.images.length") == 0
    assert EVIL in browser.get("document.body.innerText")


@pytest.mark.slow
def test_light_and_dark_and_nothing_complains(browser: Browser, tmp_path: Path) -> None:
    browser.said.clear()
    path = written(tmp_path, scanned(), scanned("noise"))
    papers = []
    for scheme in ("light", "dark"):
        browser.open(path, scheme)
        papers.append(browser.get(PAPER))
    assert papers == ["rgb(255, 255, 255)", "rgb(21, 23, 27)"]
    assert not browser.said, "no error, and nothing that the page's own policy blocked"


def width(browser: Browser, pixels: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False)


BOXES = "[...document.querySelectorAll('.run')].map(e => { const b = e.getBoundingClientRect(); " \
        "return [b.left, b.top, b.right, b.bottom]; })"  # fmt: skip
HEADINGS = "[...document.querySelectorAll('.run')].map(run => [...run.querySelectorAll('h3')].map(h => " \
           "[h.textContent, h.getBoundingClientRect().top]))"  # fmt: skip


@pytest.mark.slow
def test_two_runs_stand_side_by_side_where_there_is_room(browser: Browser, tmp_path: Path) -> None:
    """And every part of one beside the same part of the other, on one scale."""
    other = enlarged(scanned("noise"), 5, 4)
    other.summary.warnings = ["A warning that makes this run's first part taller than the other's."] * 3
    path = written(tmp_path, scanned(), other)
    for pixels in (1400, 1000):
        width(browser, pixels)
        browser.open(path)
        (a, b), (mine, theirs) = browser.get(BOXES), browser.get(HEADINGS)
        assert a[2] <= b[0], "A ends left of where B begins"
        assert b[2] > pixels - 80, "the whole width is used"
        assert mine == theirs, "equal headings at equal heights"
        assert browser.get("document.documentElement.scrollWidth") <= pixels
    width(browser, 390)
    browser.open(path)
    a, b = browser.get(BOXES)
    assert a[3] <= b[1], "one below the other"
    assert browser.get("document.documentElement.scrollWidth") <= 390
    browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.slow
def test_no_table_of_two_runs_is_cut_on_a_common_screen(browser: Browser, tmp_path: Path) -> None:
    runs = [scanned(), scanned("noise")]
    token = {"kind": "attention", "token": "\u2581classroom", "region": "special", "first": True, "occurrences": 32,
             "sinks": 32, "rate": 1.0, "heads": 53, "first_layer": 0, "last_layer": 17, "mean_alpha": 0.497,
             "sink_share": 1.0}  # fmt: skip
    for run in runs:
        run.tokens = pd.DataFrame([token]).reindex(columns=run.tokens.columns)
    arms = [[load_arms(write_arms(tmp_path / f"arms{index}", run))] for index, run in enumerate(runs)]
    path = tmp_path / "report.html"
    path.write_text(render_report(runs, compare(*runs), arms), encoding="utf-8")
    width(browser, 1280)
    browser.open(path)
    cut = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).map(box => " \
          "box.textContent)"  # fmt: skip
    assert browser.get("document.querySelectorAll('table.arms').length") == 2
    assert browser.get(cut) == []
    assert browser.get("[...document.querySelectorAll('h2')].map(e => e.textContent)")[2:4] == [
        "What A loses under interventions: arms0", "What B loses under interventions: arms1"
    ]  # fmt: skip
    browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.slow
def test_a_head_of_one_run_opens_that_of_the_other_and_both_have_one_scale(browser: Browser, tmp_path: Path) -> None:
    runs = [scanned(), scanned("noise")]
    runs[1].length_curve["sink_score"] *= 1.5
    browser.open(written(tmp_path, *runs))
    browser.get("document.querySelector('rect[data-run=\"1\"][data-head=\"6\"]').dispatchEvent("
                "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    browser.wait("document.querySelector('#detail-0 h4').textContent === 'layer 1 head 2'")
    assert browser.get("document.querySelector('#detail-1 h4').textContent") == "layer 1 head 2"
    ticks = "[0, 1].map(run => [...document.querySelectorAll(`#detail-${run} svg`)].slice(0, 2).map(svg => " \
            "[...svg.querySelectorAll('.tick.end')].map(tick => tick.textContent)))"  # fmt: skip
    browser.wait(f"JSON.stringify(({ticks})[0]) === JSON.stringify(({ticks})[1])")


def test_the_axis_of_key_positions_is_labelled(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, scanned()))
    words = "[...document.querySelectorAll('#detail-0 svg')[1].querySelectorAll('.tick.mid')].map(e => e.textContent)"
    assert browser.get(words) == ["0", "1", "2", "5", "10", "20", "key position (logarithmic scale)"]


def test_the_pointer_and_the_keys_read_an_attention_map(browser: Browser, tmp_path: Path) -> None:
    browser.said.clear()
    maps = [HeadMap(0, 0, np.array([[1.0, 0.0], [0.75, 0.25]]), ["<bos>", "\u2581cat"])] * 2
    path = tmp_path / "report.html"
    path.write_text(render_report([scanned()], None, (), [AttentionMaps("a", maps)]), encoding="utf-8")
    browser.open(path)
    told = "[...document.querySelectorAll('.attention output')].map(line => line.textContent)"
    point_at(browser, "[document.querySelectorAll('.weights')[1], 0.5, 1.5]")
    assert browser.get(told) == ["", "query 1 \u2018 cat\u2019, key 0 \u2018<bos>\u2019: 0.7500"]
    browser.get("document.querySelector('.weights').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        browser.press(key)
    assert browser.get(told)[0] == "query 0 \u2018<bos>\u2019, key 1 \u2018 cat\u2019: hidden"
    browser.press("ArrowDown")
    assert browser.get(told)[0] == "query 1 \u2018 cat\u2019, key 1 \u2018 cat\u2019: 0.2500"
    assert not browser.said


def test_print_is_dark_on_white(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, scanned()), "dark")
    assert browser.print().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    styles = "[document.body, document.querySelector('.line.c0')].map(e => getComputedStyle(e))"
    colors = browser.get(f"(s => [s[0].backgroundColor, s[0].color, s[1].stroke])({styles})")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert colors == ["rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgb(0, 103, 165)"]


def test_a_printed_heading_stays_with_what_it_heads_and_no_table_is_cut(browser: Browser, tmp_path: Path) -> None:
    """Chromium breaks a page between a heading and a box of a grid, whatever the heading asks for."""
    run = scanned()
    arms = load_arms(write_arms(tmp_path / "arms", run))
    (tmp_path / "report.html").write_text(render_report([run], None, placed([arms], [run])), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", width=718, height=900, deviceScaleFactor=1, mobile=False)
    shown = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.get(shown.format("h3", "breakAfter")) == "avoid"
    assert [browser.get(shown.format(box, "display")) for box in (".heads", ".charts", ".maps")] == ["block"] * 3
    assert browser.get("document.querySelector('table.arms').getBoundingClientRect().right") <= 718
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_a_thousand_heads_answer_at_once(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, enlarged(scanned(), 32, 32)))
    browser.wait("document.querySelector('rect.chosen') !== null")  # the script unpacks the data first
    last = "[...document.querySelectorAll('rect[data-head]')].at(-1)"
    browser.get(f"{last}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    browser.wait(f"{HEADLINE} === 'layer 31 head 31'")
    assert browser.get("document.querySelectorAll('rect[data-head]').length") == 1024
    data = json.loads(unpacked(browser.get("document.getElementById('data').textContent")))
    assert len(data[0]["heads"]) == 1024


def large(browser: Browser, path: Path) -> None:
    """Opens a page whose charts its script draws, and waits for them."""
    browser.open(path)
    browser.wait(
        "document.querySelectorAll('[data-drawing]').length === 0 && document.querySelector('rect.chosen') !== null"
    )


@pytest.mark.slow
def test_a_large_report_says_what_a_small_one_says(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its charts and data are unpacked by the script."""
    browser.said.clear()
    shown = []
    for limit in (10**9, 0):
        monkeypatch.setattr("sinkscope.present.html.report.LARGE", limit)
        large(browser, written(tmp_path, scanned(), scanned("noise")))
        browser.wait("document.querySelectorAll('rect.chosen').length === 2")
        assert browser.get(HEADLINE) is not None
        sizes = "[...document.querySelectorAll('svg')].map(each => [each.clientWidth, each.clientHeight])"
        shown.append((browser.get("document.body.innerText"), browser.get(sizes)))
    assert shown[0] == shown[1]
    assert not browser.said


AT = "document.querySelector('#maps-0 .square')"


def point_at(browser: Browser, target: str, kind: str = "mouseMoved", **button: object) -> None:
    """Moves the pointer to the middle of what a JavaScript expression [x, y, side] in the map's units says."""
    x, y = browser.get(
        f"(([svg, x, y]) => {{ svg.scrollIntoView({{block: 'center'}}); const p = new DOMPoint(x, y)"
        f".matrixTransform(svg.getScreenCTM()); return [p.x, p.y]; }})({target})"
    )
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


@pytest.mark.slow
def test_a_large_map_follows_the_pointer_and_the_keys(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.present.html.report.LARGE", 0)
    run, other = scanned(), scanned("noise")
    run.heads.loc[3, "entropy"] = np.nan
    large(browser, written(tmp_path, run, other))
    for _ in range(6):
        browser.press("Tab")
        if browser.get(FOCUSED) is not None:
            break
    assert browser.get(FOCUSED) == "0"
    for key in ("ArrowDown", *["ArrowRight"] * 4):
        browser.press(key)
    assert browser.get(FOCUSED) == "7", "the map ends at its right"
    browser.press("Enter")
    browser.wait(f"{HEADLINE} === 'layer 1 head 3'")
    assert browser.get(f"Number(document.querySelector('rect.chosen').getAttribute('y')) === {16 + 24}")
    place = "[document.querySelector('#maps-0 .map'), 44 + 24 * 2 + 12, 16 + 24 * 2 + 12]"
    point_at(browser, place)
    row = run.heads.loc[10]
    title = f"layer 2, head 2: bos_mass {row['bos_mass']:.3g} ± {row['bos_mass_sem']:.2g}"
    assert browser.get(f"{AT}.querySelector('title').textContent") == title
    for kind in ("mousePressed", "mouseReleased"):
        point_at(browser, place, kind, button="left", clickCount=1)
    browser.wait(f"{HEADLINE} === 'layer 2 head 2'")
    assert browser.get("location.hash") == "#0=layer%202%20head%202"
    choose(browser, "entropy")
    fills = {
        tuple(map(int, place)): fill
        for fill, squares in browser.get(
            "[...document.querySelectorAll('#maps-0 .map path')].map(path => ['fill', 'd'].map(name => "
            "path.getAttribute(name)))"
        )
        for place in re.findall(r"M(\d+) (\d+)h", squares)
    }
    assert len(fills) == 12
    assert fills[44 + 24 * 3, 16] == "none"
    most = run.heads.loc[run.heads["entropy"].idxmax()]
    assert fills[44 + 24 * most["head"], 16 + 24 * most["layer"]] == CIVIDIS[-1]
    assert browser.get(f"{AT}.querySelector('title').textContent").startswith("layer 2, head 2: entropy ")
    point_at(browser, "[[...document.querySelectorAll('.map')].at(-1), 50, 20]")
    words = browser.get("[...document.querySelectorAll('.map')].at(-1).querySelector('.square title').textContent")
    assert words.startswith("layer 0, head 0: ")
    assert " to " in words
    chart = "[...document.querySelectorAll('h3')].find(h => h.textContent.startsWith('Dormant')).nextElementSibling"
    first = f"{chart}.querySelector('.head').getAttribute('d').slice(1).split(/[ a]/).map(Number)"
    point_at(browser, f"[{chart}.querySelector('svg'), {first}[0] + 3.5, {first}[1]]")
    assert browser.get(f"{chart}.querySelector('.near title').textContent").startswith("layer 0, head ")


@pytest.mark.slow
def test_ten_thousand_heads_open_with_few_elements(browser: Browser, tmp_path: Path) -> None:
    """What a browser lays out does not grow with the heads, and each head costs few bytes."""
    browser.said.clear()
    run = enlarged(scanned(), 80, 128, sequences=2)
    run.heads["bos_mass"] = np.random.default_rng(0).uniform(0, 1, len(run.heads))  # every colour there is
    path = written(tmp_path, run)
    assert path.stat().st_size < 350 * 80 * 128
    large(browser, path)
    assert browser.get("document.querySelectorAll('*').length") < 6000
    assert browser.get("document.querySelectorAll('#maps-0 .map *').length") < 800
    browser.get("document.getElementById('all-0').open = true")
    browser.wait("document.querySelectorAll('#all-0 tbody tr').length === 200")
    browser.get("document.querySelector('#all-0 .more').click()")
    assert browser.get("document.querySelectorAll('#all-0 tbody tr').length") == 400
    assert browser.get("document.querySelector('#all-0 output').textContent") == "400 of 10240 heads"
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", width=718, height=900, deviceScaleFactor=1, mobile=False)
    right = "[...document.querySelectorAll('.map, .all table')].map(each => each.getBoundingClientRect().right)"
    assert max(browser.get(right)) <= 718, "the width of a page of A4"
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.get("location.hash = '#0=' + encodeURIComponent('layer 79 head 127')")
    browser.wait(f"{HEADLINE} === 'layer 79 head 127'")
    assert not browser.said
