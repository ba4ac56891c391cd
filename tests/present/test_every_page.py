"""Every page that is written, in headless Chromium: none scrolls sideways, complains or fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from arm_folders import write_arms
from browser import CHROMIUM, Browser
from desk import enlarged, hostile, scanned

import sinkscope
from sinkscope.claims.claim import CLAIMS
from sinkscope.claims.findings import put
from sinkscope.claims.page import in_html, make_page
from sinkscope.claims.subject import Subject
from sinkscope.comparison.baseline import baseline_of
from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.gate import check
from sinkscope.experiments.attention_map import HeadMap
from sinkscope.present.figures.run import draw
from sinkscope.present.html.atlas import render_atlas
from sinkscope.present.html.attention import AttentionMaps
from sinkscope.present.html.check import render_check
from sinkscope.present.html.report import render_report
from sinkscope.runs.atlas import atlas
from sinkscope.runs.run import Run
from sinkscope.runs.saved.arms import load_arms, placed

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (chromium, google-chrome on PATH)"),
    pytest.mark.slow,
]

LONG = "a-very-long-name-" * 12
CELL = '<!doctype html><meta name="viewport" content="width=device-width"><title>cell</title><body>'


def rich(folder: Path) -> str:
    """A report of all that a run may have: several texts, switches, tokens, arms."""
    run = scanned()
    token = {
        "stream": "text", "kind": "attention", "token": LONG, "region": "text", "first": False, "sinks": 3,
        "occurrences": 8, "rate": 0.375, "heads": 2, "first_layer": 0, "last_layer": 1, "mean_alpha": 0.4,
        "sink_share": 1.0,
    }  # fmt: skip
    run.tokens = pd.DataFrame([token])
    keys = run.heads[["stream", "layer", "head"]]
    run.measured["switch"] = keys.assign(sink_rows=0.5, sink_rows_sem=0.01, off_rate=0.25, switch_phi=np.nan)
    arms = load_arms(write_arms(folder / "arms", run))
    return render_report([run], None, placed([arms], [run]))


def several(folder: Path) -> str:
    names = [scanned(), scanned("noise")]
    for place, run in enumerate(names):
        run.path = Path(f"/runs/{LONG}{place}")
    return render_atlas(atlas([*names, hostile(scanned(), LONG)]))


def compared(folder: Path) -> str:
    run: Run = enlarged(scanned(), 3, 32)
    return render_report([run, run], compare(run, run))


def mapped(folder: Path) -> str:
    run = scanned()
    maps = [HeadMap(0, head, np.eye(2), [LONG, "b"]) for head in range(3)]
    return render_report([run, run], compare(run, run), (), [AttentionMaps(LONG, maps)] * 2)


def checked(now: Run, then: Run) -> str:
    baseline = baseline_of(then)
    return render_check(check(now, baseline), baseline.facts, now.manifest)


def dense(folder: Path) -> str:
    run = hostile(enlarged(scanned(), 8, 128, sequences=2), LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.present.html.report.LARGE", 0)
        return render_report([run, run], compare(run, run))


def claimed(folder: Path) -> str:
    claim, run = CLAIMS["hard-switch"], scanned()
    page = make_page(put([claim], [Subject(LONG, given=run)]), [claim], {"switch": ("claims-switch.png", "A caption.")})
    return in_html(page, {"claims-switch.png": draw(run, "heatmap", "png", "page")})


PAGES: dict[str, Callable[[Path], str]] = {
    "rich": rich,
    "compared": compared,
    "dense": dense,
    "with attention maps": mapped,
    "failed check": lambda folder: checked(hostile(scanned("zero head"), LONG), hostile(scanned(), LONG)),
    "passed check": lambda folder: checked(scanned(), scanned()),
    "atlas": several,
    "claims": claimed,
    "cell of a run": lambda folder: CELL + str(hostile(enlarged(scanned(), 3, 32), LONG)._repr_html_()),
    "cell of a comparison": lambda folder: CELL + str(sinkscope.compare(scanned(), scanned("noise"))._repr_html_()),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_fits_a_phone_and_a_desk_and_nothing_complains(browser: Browser, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[kind](tmp_path), encoding="utf-8")
    for scheme in ("light", "dark"):
        for width in (390, 1400):
            browser.said.clear()
            browser.open(path, scheme)
            browser.wait("!document.getElementById('data') || document.querySelector('rect.chosen') !== null")
            browser.get("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            browser.picture(tmp_path / "page.png", width)
            assert browser.get("document.documentElement.scrollWidth") <= width, (scheme, width)
            assert browser.get("performance.getEntriesByType('resource').length") == 0
            assert not browser.said


SPOKEN = ("button", "link", "textbox", "searchbox", "combobox", "img", "image", "table", "figure", "region")
"""Roles that a screen reader announces by name."""


@pytest.mark.parametrize("kind", PAGES)
def test_what_a_screen_reader_announces_has_a_name(browser: Browser, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[kind](tmp_path), encoding="utf-8")
    browser.open(path)
    browser.wait("!document.getElementById('data') || document.querySelector('rect.chosen') !== null")
    browser.get("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    spoken = [node for node in nodes if not node["ignored"] and node["role"]["value"] in SPOKEN]
    assert len(spoken) > 1
    silent = [node["role"]["value"] for node in spoken if not node.get("name", {}).get("value")]
    assert not [role for role in silent if role != "figure"], "a figure may be named by its heading"
    levels = browser.get("[...document.querySelectorAll('h1, h2, h3, h4')].map(each => Number(each.tagName[1]))")
    assert all(after <= before + 1 for before, after in zip([0, *levels], levels, strict=False)), "no level is left out"
