"""Screens, pages and figures of runs that are rare: several domains, one layer, nothing known, more than is shown."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from desk import enlarged, scanned
from typer.testing import CliRunner

import sinkscope
from sinkscope import SinkscopeError, load_run
from sinkscope.cli import app
from sinkscope.comparison.baseline import baseline_of
from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy, Rule
from sinkscope.present.figures.canvas import drawn
from sinkscope.present.html.report import render_report
from sinkscope.present.html.svg import Dot, Line, line_chart, scatter
from sinkscope.present.terminal.bench import render_bench
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.present.terminal.run import render_run
from sinkscope.present.terminal.table import ROWS
from sinkscope.present.verdict import markdown_verdict, render_verdict
from sinkscope.runs.papers import published_for
from sinkscope.runs.run import Run
from sinkscope.runs.saved.speed import BACKBONE, LATER, PLAIN, SCAN, Cost, Speed
from sinkscope.runs.schema.stream import SinksBeyondFirst, SinkToken
from sinkscope.runs.schema.summary import DomainSummary


@pytest.fixture(scope="module")
def domains(tiny_folder: Path) -> Run:
    return sinkscope.scan(str(tiny_folder), data=["prose", "code"], seq_len=32, num_sequences=4, self_check=False)


@pytest.mark.slow
def test_a_map_of_differences_that_is_too_narrow_for_numbers() -> None:
    """A character a head: from a tenth of the largest difference on, and from half of it."""
    run, other = enlarged(scanned(), 1, 40), enlarged(scanned(), 1, 40)
    for head, shift in enumerate((0.0, 0.04, 0.2, -0.2, 0.8, -0.8)):
        other.sequences.loc[other.sequences["head"] == head, "bos_mass"] += shift
    other.sequences.loc[other.sequences["head"] == 6, "bos_mass"] = np.nan
    text = render_comparison(compare(run, other, metrics=["bos_mass"]), width=80)
    assert "+ - from 0.08, ▲ ▼ from 0.4" in text
    assert "    0 ..+-▲▼?" + "." * 33 in text


@pytest.mark.slow
def test_domains_are_compared_on_the_page(domains: Run) -> None:
    page = render_report([domains], None)
    assert "text, prose" not in page, "one stream is not named"
    for name in ("prose", "code"):
        assert re.search(rf">\s*{name}\s*<", page), name


def test_a_domain_that_lacks_a_stream_is_left_out_of_its_tables(domains: Run) -> None:
    run = copy.deepcopy(domains)
    run.summary.domains["code"].streams = {"cross": run.summary.domains["code"].streams["text"]}
    text = render_run(run, width=100)
    table = text[text.index("by dataset: sink rate") : text.index("BOS mass, prose against")]
    assert "prose" in table
    assert "code" not in table


@pytest.mark.slow
def test_dormant_heads_of_more_domains_than_are_listed_are_counted(domains: Run) -> None:
    run = copy.deepcopy(domains)
    entry = run.summary.domains["prose"]
    entry.streams["text"].dormant.count, entry.streams["text"].dormant.heads = 1, [(0, 2)]
    run.summary.domains = {f"text {number}": entry for number in range(ROWS + 3)}
    text = render_run(run, width=100)
    part = text[text.index("dormant heads (") :]
    assert part.count(": 0.2\n") == ROWS
    assert "and in 3 more datasets (heads.csv)" in part


def test_published_numbers_stand_below_the_run_s_own() -> None:
    run = scanned()
    run.summary.published = published_for("meta-llama/meta-llama-3-8b")
    text = render_run(run, width=100)
    assert "published for this model" in text
    assert "99.02 %" in text
    assert "not comparable" not in text


def test_published_numbers_that_no_scan_measures_alike_are_counted() -> None:
    run = scanned()
    run.summary.published = published_for("meta-llama/Llama-3.1-8B")
    text = " ".join(render_run(run, width=100).split())
    assert (
        "published, but not comparable with a scan: 1 x sink_rate, 1 x zeroable_heads_by_bos_mass, 1 x "
        "zeroable_heads_by_honor (summary.json says why)" in text
    )
    assert "published for this model" not in text


def test_a_run_whose_contrasts_have_no_table(domains: Run, tmp_path: Path) -> None:
    """As a run saved before domains.csv: the summary's own count is shown."""
    shown = render_run(domains, width=100)
    count = domains.summary.domains_compared[0].heads_tested
    assert f"of {count} heads differ" in shown
    domains.save(tmp_path / "run")
    bare = load_run(tmp_path / "run")
    bare.domains = None
    assert f"of {count} heads differ" in render_run(bare, width=100)


@pytest.mark.slow
def test_breaches_beyond_those_shown_are_counted() -> None:
    run = scanned()
    run.sequences["bos_mass"] += 0.1
    big = enlarged(run, 10, 30)
    verdict = check(
        big,
        baseline_of(enlarged(scanned(), 10, 30)),
        Policy(rules=[Rule(metric="bos_mass", level="head", max_change=0.0)]),
    )
    assert len(verdict.breaches) == 300
    lines = render_verdict(verdict).splitlines()
    assert lines[-1].endswith("more (--json or --junit lists them all)")
    shown = sum(line.startswith("  ") for line in lines) - 1
    assert f"and {300 - shown} more" in lines[-1]
    table = markdown_verdict(verdict)
    rows = sum(line.startswith("| bos_mass | layer ") for line in table.splitlines())
    assert f"\nand {300 - rows} more\n" in table


@pytest.mark.parametrize("log", [True, False])
def test_a_chart_of_one_place_without_a_number(log: bool) -> None:
    chart = line_chart([Line("empty", [3.0], [float("nan")])], "layer", "value", log=log)
    assert chart.startswith("<svg")
    assert "nan" not in chart.lower()


@pytest.mark.parametrize(("log", "missing"), [(False, float("nan")), (True, 0.0)])
def test_a_line_breaks_where_a_value_is_missing(log: bool, missing: float) -> None:
    """A stroke across the gap would show values that nobody measured."""
    values = [missing, 1.0, 2.0, missing, 3.0, missing]
    chart = line_chart([Line("norm", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], values)], "layer", "value", log=log)
    (path,) = re.findall(r'<path class="line c0" d="([^"]*)"', chart)
    assert re.findall("[ML]", path) == ["M", "L", "M"]
    assert chart.count("<circle") == 3


def test_a_page_of_runs_of_other_shapes_has_no_map_of_differences(tmp_path: Path) -> None:
    small, large = scanned(layers=2), scanned()
    result = compare(small, large)
    page = render_report([small, large], result)
    assert "difference of" not in page
    assert "heads cannot be matched" in page


@pytest.mark.slow
def test_runs_that_cannot_be_compared_stand_side_by_side(tmp_path: Path) -> None:
    for name, domains in (("a", ("x", "y")), ("b", ("z", "w"))):
        run = scanned(text=ord(name))
        first, second = (run.manifest.data[0].model_copy(update={"domain": domain}) for domain in domains)
        run.manifest.data = [first, second]
        run.sequences["domain"] = np.where(run.sequences["sequence"] < 4, *domains)
        run.save(tmp_path / name)
    words = ["report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "warning: the runs are not compared: the runs share no dataset (x, y against z, w):" in result.stderr
    assert (tmp_path / "page.html").is_file()


def test_a_device_that_does_not_tell_its_memory() -> None:
    costs = dict.fromkeys((PLAIN, BACKBONE, SCAN, LATER), Cost([1.0], 1234.5, None, None))
    text = render_bench(Speed("tiny", "mps:0", "float32", 2, 64, 2, 0.25, 128, None, costs, {}))
    assert "What fits is not known: this device does not tell its memory." in text


def test_a_bench_of_one_thread_and_of_less_than_a_second() -> None:
    costs = dict.fromkeys((PLAIN, BACKBONE, SCAN, LATER), Cost([0.01], 1234.5, None, None))
    text = render_bench(Speed("tiny", "cpu", "float32", 1, 64, 32, 0.25, 128, None, costs, {}))
    assert "on cpu, 1 thread: 32 x" in text
    assert "takes less than 1 s here" in " ".join(text.split())


def test_figures_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SinkscopeError, match=r"figures need matplotlib: pip install 'sinkscope\[figures\]'"):
        drawn(lambda figure: None, "about", "png", (3, 2))


def test_the_answer_of_a_domain_does_not_hide_sinks_beyond_the_first_token() -> None:
    """A BOS behind other tokens is a sink in every sequence: `No sink at the first token` alone would deny it."""
    run = scanned()
    stream = run.summary.streams["text"]
    late = SinkToken(token="<bos>", id=1, region="text", kind="attention", sinks=8, occurrences=8, heads=3)
    found = SinksBeyondFirst(tokens=[late], others=0, created=1, gone=None)
    streams = {"text": stream.model_copy(update={"sinks_beyond_first": found})}
    run.summary.domains = {name: DomainSummary(streams=streams) for name in "ab"}
    answer = " ".join(render_run(run, width=200).split())
    assert answer.count("No sink at the first token") == 2
    assert answer.count("'<bos>' (8 of 8 occurrences, in 3 heads). The first is in layer 1; some are in the last") == 2


def test_what_a_dot_says_stays_text() -> None:
    """Questions from outside write it, and name tokens in it."""
    dots, _ = scatter([Dot(0.1, 0.2, "#000", "<script>")], "x", "y")
    assert "<title>&lt;script&gt;</title>" in dots
