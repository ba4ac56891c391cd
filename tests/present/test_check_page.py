"""The page of a check: where a change begins, what moved, in which head; escaping, no network, no script."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from desk import enlarged, hostile, scanned
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.comparison.baseline import baseline_of, baseline_text
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy, Rule
from sinkscope.present.html.check import LISTED, render_check
from sinkscope.present.verdict import by_size, headline, where
from sinkscope.runs.run import Run

EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[1m"
ROW = re.compile(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>')


def page_of(now: Run, then: Run, policy: Policy | None = None) -> str:
    baseline = baseline_of(then)
    verdict = check(now, baseline, policy) if policy else check(now, baseline)
    return render_check(verdict, baseline.facts, now.manifest)


def part(page: str, name: str) -> str:
    """What stands between a heading and the next one."""
    return page[page.index(f'<h2 id="{name}">') :].split("<h2", 2)[1]


def test_a_failed_check_says_where_it_begins_and_what_moved() -> None:
    now, then = scanned("zero head"), scanned()
    verdict = check(now, baseline_of(then))
    page = page_of(now, then)
    assert headline(verdict) in page
    assert all(line in page for line in where(verdict))
    layers = [name for name, _ in ROW.findall(part(page, "begins"))]
    assert layers == ["1", "2"]
    listed = [name for name, _ in ROW.findall(part(page, "breaches"))]
    assert listed == [breach.metric for breach in by_size(verdict.breaches)][:LISTED]
    outlined = re.findall(r'class="moved"><title>layer (\d+), head (\d+): [^<]*allowed', part(page, "heads"))
    of_heads = [(breach.layer, breach.head) for breach in verdict.breaches if breach.head is not None]
    assert sorted((int(layer), int(head)) for layer, head in outlined) == sorted(of_heads)
    counts = [int(re.sub("<.*?>", " ", cells).split()[-1]) for _, cells in ROW.findall(part(page, "rules"))]
    assert counts == [len(tally.breaches) for tally in verdict.tallies]


def test_a_square_is_the_difference_of_its_head() -> None:
    now, then = scanned("noise"), scanned()
    page = page_of(now, then, Policy(rules=[Rule(metric="entropy", level="head", max_change=0.0)]))
    titles = dict(re.findall(r"<title>(layer \d+, head \d+): \S+ to \S+ \((\S+), allowed ±0\)", page))
    before, after = (run.heads.set_index(["layer", "head"])["entropy"] for run in (then, now))
    assert len(titles) == 12
    for (layer, head), change in (after - before).items():  # type: ignore[misc]
        assert float(titles[f"layer {layer}, head {head}"]) == pytest.approx(change, rel=0.01, abs=1e-6)


def test_a_passed_check_has_no_breaches() -> None:
    page = page_of(scanned(), scanned())
    assert "The sinks moved no farther than allowed" in page
    assert 'id="breaches"' not in page
    assert 'id="rules"' in page
    one = page_of(scanned(), scanned(), Policy(rules=[Rule(metric="bos_mass", level="head", max_change=0.1)]))
    assert ": 1 rule, " in one


def test_a_value_that_is_missing_on_one_side_is_outlined() -> None:
    now = scanned()
    now.sequences.loc[now.sequences["layer"] == 1, "entropy"] = np.nan
    page = page_of(now, scanned(), Policy(rules=[Rule(metric="entropy", level="head", max_change=0.5)]))
    assert len(re.findall(r'fill="none" class="moved"><title>layer 1, head \d: \S+ to - ', page)) == 4


def test_the_page_needs_no_network_and_no_script() -> None:
    evil = hostile(scanned("zero head"), EVIL)
    page = page_of(evil, hostile(scanned(), EVIL))
    assert "<script" not in page
    assert "<img" not in page
    assert "\x1b" not in page
    assert "alert(1)" in page
    assert "default-src &#39;none&#39;" in page
    assert not re.findall(r'(?:src|href)="', page)


@pytest.mark.slow
def test_a_page_of_many_heads_stays_small() -> None:
    then = enlarged(scanned(), 80, 64, sequences=2)
    now = enlarged(scanned(), 80, 64, sequences=2)
    now.sequences["entropy"] *= 1.3
    page = page_of(now, then)
    assert len(page.encode()) < 3_000_000
    assert 'class="moved"' in page
    assert "and " in part(page, "breaches")


def test_the_command_writes_it_also_where_the_check_fails(tmp_path: Path) -> None:
    (tmp_path / "sinks.json").write_text(baseline_text(baseline_of(scanned())), encoding="utf-8")
    for plant, code in (("zero head", 1), ("", 0)):
        scanned(plant).save(tmp_path / "run", force=True)
        page = tmp_path / f"check{code}.html"
        arguments = ["check", str(tmp_path / "run"), "--baseline", str(tmp_path / "sinks.json"), "--html", str(page)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert ("FAILED" in page.read_text()) == bool(code)
        assert f"wrote {page}" in result.stderr
    refused = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "none" / "x.html")])
    assert refused.exit_code == 2
