"""The page of many runs: escaping, no network; in headless Chromium sorting, searching, both widths and schemes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from desk import hostile, scanned

from sinkscope.present.html.atlas import NAME, render_atlas
from sinkscope.present.text import cut_in_the_middle
from sinkscope.runs.atlas import atlas
from sinkscope.runs.run import Run

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">\x1b[1m"
COLUMN = "[...document.querySelectorAll('.atlas tbody tr')].map(row => row.cells[{}].innerText.split('\\n')[0].trim())"


def several() -> list[Run]:
    """Three runs: one of a model with published numbers, one without softmax, one with a long name."""
    known, raw, long = scanned(), scanned("noise"), scanned("no bos")
    known.manifest.model.id, known.path = "meta-llama/Llama-2-7b-hf", Path("/runs/b")
    known.manifest.data[0].bos = "auto"
    stream = known.summary.streams["text"]
    stream.tokens_per_sequence, stream.sink_rate_percent["0.3"].t64 = 64, 12.5
    for site in raw.manifest.attention:
        site.score = "relu"
    raw.path, long.path = Path("/runs/a"), Path("/runs/" + "c" * 80)
    return [known, raw, long]


def test_names_stay_text_and_nothing_is_fetched() -> None:
    page = render_atlas(atlas([hostile(scanned(), EVIL), *several()]))
    assert page.count("<script") == 1
    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert "\x1b" not in page
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[0]
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    assert "unsafe" not in policy
    assert not re.findall(r"\b(?:src|href|style|on\w+)=", re.sub(r"&lt;.*?&gt;|<script>.*", "", page, flags=re.S))


def test_unequal_lengths_are_told_and_sorted_by_the_longest() -> None:
    run = scanned()
    run.manifest.data[0].shortest = 20
    assert '<td data-sort="48">20 to 48</td>' in render_atlas(atlas([run]))


def test_published_numbers_stand_below_their_own() -> None:
    page = render_atlas(atlas(several()))
    cell = re.findall(r'<td data-sort="12.5">(.*?)</td>', page)[0]
    assert cell.startswith("12.5<svg")
    assert "Gu et al. 2410.10781 table 1" in cell
    assert cell.endswith(">92.47</span>")
    assert "<li>18 x perplexity: a scan measures no loss" in page
    assert page.count('class="strip"') == 2, "attention without softmax has no BOS mass to show"


without_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (chromium on PATH)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "atlas.html"
    path.write_text(render_atlas(atlas([*several(), hostile(scanned(), EVIL)])), encoding="utf-8")
    return path


def press(browser: Browser, label: str) -> None:
    browser.get(f"[...document.querySelectorAll('.atlas button')].find(b => b.innerText === {label!r}).click()")


@pytest.mark.slow
@without_chromium
def test_a_heading_sorts_and_missing_values_stay_last(browser: Browser, page: Path) -> None:
    browser.open(page)
    heads = browser.get("[...document.querySelectorAll('.atlas thead button')].map(b => b.innerText)")
    place = heads.index("first-token attention")
    orders = []
    for _ in range(2):
        press(browser, "first-token attention")
        orders.append(browser.get(COLUMN.format(place)))
    assert orders[0][-1] == orders[1][-1] == "-"
    down = [float(value.split()[0]) for value in orders[0][:-1]]
    assert down == sorted(down, reverse=True)
    assert [float(value.split()[0]) for value in orders[1][:-1]] == sorted(down)
    assert browser.get("document.querySelectorAll('[aria-sort]').length") == 1
    press(browser, "run")
    assert browser.get(COLUMN.format(0))[0] == "a"


@pytest.mark.slow
@without_chromium
def test_rows_are_searched(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.get(
        "(field => { field.value = 'llama 2-7b'; field.dispatchEvent(new Event('input')); })"
        "(document.getElementById('filter'))"
    )
    assert browser.get("[...document.querySelectorAll('.atlas tbody tr')].filter(row => !row.hidden).length") == 1
    assert browser.get("document.getElementById('count').textContent") == "1 of 4"


def test_names_are_cut_in_the_middle_and_what_tells_runs_apart_is_shown(tmp_path: Path) -> None:
    run = scanned()
    run.manifest.model.name = "somebody/a-model-of-a-family-with-a-long-name-step-1000"
    run.summary.first_token = run.summary.first_token.model_copy(update={"id": None, "text": None, "distinct": 3})
    run.manifest.data[0].first_token = None
    half = scanned(dtype="bfloat16")
    page = render_atlas(atlas([run, half]))
    assert 'title="somebody/a-model-of-a-family-with-a-long-name-step-1000"' in page
    assert f">{cut_in_the_middle(run.manifest.model.name, NAME)}<" in page
    assert cut_in_the_middle("abcdefghij", 7) == "abc\u2026hij"
    assert ">differs<" in page
    assert page.index(">dtype<") < page.index(">text<")
    assert ">float32<" in page
    assert ">bfloat16<" in page


def test_a_display_name_and_a_folder_s_own_name_stand_for_long_paths() -> None:
    run = scanned()
    run.manifest.model.id = "/somewhere/far/away/smol"
    assert run.manifest.model.shown == "smol"
    run.manifest.model.name = "SmolLM2"
    assert run.manifest.model.shown == "SmolLM2"
    run.manifest.model.id, run.manifest.model.name = "owner/smol", None
    assert run.manifest.model.shown == "owner/smol"


@pytest.mark.slow
@without_chromium
def test_a_wide_screen_shows_columns_and_no_margins(browser: Browser, page: Path, tmp_path: Path) -> None:
    """At 2,000 pixels the page kept 300 of them empty, and scrolled its last columns."""
    browser.open(page)
    browser.picture(tmp_path / "page.png", 2000)
    assert browser.get("document.querySelector('main').getBoundingClientRect().width") > 1950
