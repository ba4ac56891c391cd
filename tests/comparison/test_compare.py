"""Comparing runs: arithmetic against scipy, false alarms under the null hypothesis, pairing, shapes, screen, CLI."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import Scan
from desk import enlarged, scanned
from scipy import stats
from tiers import slow_but
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.comparison.compare_runs import Comparison, compare
from sinkscope.comparison.levels import Listed
from sinkscope.errors import SinkscopeError
from sinkscope.present.html.comparison import comparison_view
from sinkscope.present.numbers import interval
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.runs.per_sequence import cells
from sinkscope.runs.run import Run
from sinkscope.runs.schema.base import to_json
from sinkscope.runs.statistics import (
    beyond,
    false_discovery,
    from_moments,
    paired_difference,
    welch_difference,
)

RANDOM = np.random.default_rng(3)
A = RANDOM.normal(0.4, 0.1, (9, 5))
B = A + RANDOM.normal(0.02, 0.03, (9, 5))


def test_paired_test_is_scipys() -> None:
    ours, theirs = paired_difference(A, B), stats.ttest_rel(B, A)
    np.testing.assert_allclose(ours.p, theirs.pvalue, rtol=1e-10)
    np.testing.assert_allclose(ours.difference / ours.sem, theirs.statistic, rtol=1e-10)


def test_welch_is_scipys() -> None:
    ours, theirs = welch_difference(A[:6], B), stats.ttest_ind(B, A[:6], equal_var=False)
    np.testing.assert_allclose(ours.p, theirs.pvalue, rtol=1e-10)
    moments = from_moments(*(f(x) for x in (A[:6], B) for f in (_mean, stats.sem, _count)))
    np.testing.assert_allclose(moments.p, theirs.pvalue, rtol=1e-10)


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(0)


def _count(values: np.ndarray) -> np.ndarray:
    return np.full(values.shape[1], len(values))


def test_missing_sequences_are_left_out_and_missing_cells_stay_missing() -> None:
    a, b = A.copy(), B.copy()
    a[0, 0], b[:, 1] = np.nan, np.nan
    ours = paired_difference(a, b)
    assert ours.p[0] == pytest.approx(stats.ttest_rel(b[1:, 0], a[1:, 0]).pvalue)
    assert ours.a[0] == pytest.approx(a[1:, 0].mean())
    assert np.isnan([ours.p[1], ours.difference[1], ours.sem[1]]).all()


def test_a_difference_within_rounding_is_none() -> None:
    """A layer's mean of honor is 1 by definition, and -7e-9 of it was significant with so small an error."""
    draw = np.random.default_rng(0)
    a = 1 + draw.normal(0, 3e-9, (32, 3))
    b = a + np.array([-7e-9, 5e-7, 1e-5]) + draw.normal(0, 2e-9, (32, 3))
    for found in (paired_difference(a, b), welch_difference(a, b)):
        assert (found.p[:2] == 1).all()
        assert (found.low[:2] <= 0).all()
        assert (found.high[:2] >= 0).all()
        assert found.p[2] < 1e-9, "more than rounding"


def test_equal_samples_have_p_one_and_constant_shifts_p_zero() -> None:
    assert (paired_difference(A, A).p == 1).all()
    exact = np.round(A * 64) / 64
    assert (paired_difference(exact, exact + 0.5).p == 0).all()


def test_q_is_benjamini_hochberg_over_what_is_there() -> None:
    p = np.array([0.01, np.nan, 0.04, 0.03])
    np.testing.assert_allclose(false_discovery(p), [0.03, np.nan, 0.04, 0.04])


def test_intervals_are_scipys() -> None:
    paired, welch = paired_difference(A, B), welch_difference(A[:6], B)
    theirs = (
        stats.ttest_rel(B, A).confidence_interval(),
        stats.ttest_ind(B, A[:6], equal_var=False).confidence_interval(),
    )
    for ours, (low, high) in zip((paired, welch), theirs, strict=True):
        np.testing.assert_allclose(ours.low, low, rtol=1e-10)
        np.testing.assert_allclose(ours.high, high, rtol=1e-10)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 32])
def test_interval_and_p_say_the_same(count: int) -> None:
    """The interval leaves out 0 exactly where p < 0.05, also where values are missing or do not vary."""
    noise = np.random.default_rng(count)
    a, b = noise.normal(size=(count, 2000)), noise.normal(0.7, 1, (count, 2000))
    a[0, :50] = b[-1, 50:100] = np.nan
    a[:, 100:110] = b[:, 105:115] = 0.25
    both = 0
    for found in (paired_difference(a, b), welch_difference(a, b)):
        leaves_out = (found.low > 0) | (found.high < 0)
        np.testing.assert_array_equal(leaves_out, found.p < 0.05)
        np.testing.assert_array_equal(np.isnan(found.low), np.isnan(found.p))
        np.testing.assert_array_equal(np.isnan(found.high), np.isnan(found.p))
        assert (found.low[105:110] == 0).all(), "equal constants"
        both += int(leaves_out.sum())
    assert 0 < both < 4000


def test_beyond_an_allowance_is_scipys_shifted_test() -> None:
    first, second = A[:6], B
    moments = [_mean(first), _mean(second)]
    change = np.abs(moments[1] - moments[0])
    errors = (stats.sem(first), _count(first), stats.sem(second), _count(second))
    plain = stats.ttest_ind(second, first, equal_var=False).pvalue
    np.testing.assert_allclose(beyond(change, np.zeros(5), *errors), plain, rtol=1e-9)
    sign = np.sign(moments[1] - moments[0])
    upper, lower = (
        stats.ttest_ind(second * sign, first * sign + shift, equal_var=False, alternative="greater").pvalue
        for shift in (0.01, -0.01)
    )
    np.testing.assert_allclose(beyond(change, np.full(5, 0.01), *errors), upper + lower, rtol=1e-9)


def test_beyond_at_the_edge_of_what_is_allowed_alarms_as_often_as_it_says() -> None:
    """A true difference of exactly the allowance: 5 % below p = 0.05, within five standard errors."""
    noise = np.random.default_rng(4)
    a, b = noise.normal(size=(12, 20_000)), noise.normal(0.8, 1, (12, 20_000))
    change = np.abs(_mean(b) - _mean(a))
    p = beyond(change, np.full(20_000, 0.8), stats.sem(a), _count(a), stats.sem(b), _count(b))
    assert (p < 0.05).mean() == pytest.approx(0.05, abs=5 * np.sqrt(0.05 * 0.95 / 20_000))


def test_intervals_of_what_does_not_vary_or_is_missing() -> None:
    exact = np.round(A * 64) / 64
    found = paired_difference(exact, exact + 0.5)
    assert (found.low == 0.5).all()
    assert (found.high == 0.5).all()
    assert np.isnan(paired_difference(A[:1], B[:1]).low).all()
    a = A.copy()
    a[3:, 0] = np.nan
    assert paired_difference(a, B).high[0] == paired_difference(A[:3], B[:3]).high[0]
    a[:, 0] = np.inf
    assert np.isnan(paired_difference(a, B).low[0])


def test_false_alarms_under_the_null() -> None:
    """10,000 comparisons of equal means: 5 % below p = 0.05, within five standard errors; no q below 0.05 mostly."""
    noise = np.random.default_rng(1)
    a, b = noise.normal(size=(2, 12, 10_000))
    for result in (paired_difference(a, b), welch_difference(a, b)):
        assert (result.p < 0.05).mean() == pytest.approx(0.05, abs=5 * np.sqrt(0.05 * 0.95 / 10_000))
    batches = paired_difference(a, b).p.reshape(100, 100)
    alarms = sum((false_discovery(p) < 0.05).any() for p in batches)
    assert alarms <= 5 + 5 * np.sqrt(100 * 0.05 * 0.95)


def test_a_run_equals_itself() -> None:
    result = compare(scanned(), scanned(), metrics=[])
    for table in (result.heads, result.layers, result.summary):
        assert (table["difference"].dropna() == 0).all()
    assert all(not heads for heads in result.changes.values())


def test_differences_are_those_of_the_tables() -> None:
    a, b = scanned(), scanned("noise")
    result = compare(a, b)
    rows = result.heads[result.heads["metric"] == "bos_mass"]
    np.testing.assert_allclose(rows["difference"], b.heads["bos_mass"] - a.heads["bos_mass"], atol=1e-12)
    layers = result.layers[result.layers["metric"] == "entropy"]
    np.testing.assert_allclose(layers["b"], b.layers["mean_entropy"], rtol=1e-12)
    assert (rows["low"] <= rows["difference"] + 1e-15).all()
    assert (rows["difference"] <= rows["high"] + 1e-15).all()
    first = rows[rows["layer"] == 0]
    assert (first["difference"] == 0).all(), "noise in layer 1 leaves layer 0 as it was"
    assert (rows[rows["layer"] == 1]["q"] < 1).any()


def test_the_table_holds_scipys_numbers() -> None:
    """From two runs to p and q, against scipy on the raw record."""
    a, b = scanned(), scanned("noise")
    rows = compare(a, b, metrics=["entropy"]).heads.query("layer == 1")
    p = []
    for head in range(4):
        x, y = (each.sequences.query(f"layer == 1 and head == {head}")["entropy"].to_numpy() for each in (a, b))
        p.append(stats.ttest_rel(y, x).pvalue)
    np.testing.assert_allclose(rows["p"], p, rtol=1e-8)
    every = compare(a, b, metrics=["entropy"]).heads
    np.testing.assert_allclose(every["q"], stats.false_discovery_control(every["p"]), rtol=1e-9)


def test_layer_metrics_are_compared_by_layer() -> None:
    a, b = scanned(), scanned("noise")
    result = compare(a, b, metrics=["norm_other"])
    np.testing.assert_allclose(result.layers["a"], a.layers["norm_other"], rtol=1e-12)
    assert len(result.heads) == 0
    assert "mean over all layers" in render_comparison(result)


def test_cells_do_not_depend_on_the_order_of_rows() -> None:
    run = scanned()
    before = cells(run, run.sequences["domain"].iloc[0], "layer", ["bos_mass", "norm_other"])
    run.sequences = run.sequences.sort_values("sequence", kind="stable", ascending=False)
    after = cells(run, run.sequences["domain"].iloc[0], "layer", ["bos_mass", "norm_other"])
    np.testing.assert_array_equal(before.values, after.values)


def test_other_text_is_refused_with_the_reason() -> None:
    a, b = scanned(), scanned(text=1)
    with pytest.raises(SinkscopeError, match=r"token sequences .* differ .*paired=False"):
        compare(a, b)
    result = compare(a, b, paired=False)
    assert not result.paired
    assert result.heads["p"].notna().all()


def test_a_difference_in_length_is_told_before_any_number() -> None:
    a, b = scanned(), scanned(text=1)
    assert not any("length" in note for note in compare(a, b, paired=False).notes)
    b.manifest.data[0].seq_len = 99
    result = compare(a, b, metrics=["bos_mass"], paired=False)
    (note,) = result.notes
    domain, length = a.manifest.data[0].domain, a.manifest.data[0].seq_len
    assert note.startswith(f"{domain}: the sequences differ in length ({length} tokens in A, 99 tokens in B).")
    assert result.as_dict()["a"]["tokens"] == [str(length)]
    assert comparison_view(result)["lead"].count(f"differ in length ({length} tokens and 99 tokens)") == 1


def test_interrupted_runs_are_compared_as_far_as_they_go() -> None:
    a, b = scanned(), scanned("noise")
    whole = compare(a, b)
    b.sequences = b.sequences[b.sequences["sequence"] < 5]
    part = compare(a, b)
    assert any("first 5 sequences" in note for note in part.notes)
    assert not np.allclose(part.heads["difference"], whole.heads["difference"])


def test_other_shapes_by_summary_only() -> None:
    result = compare(scanned(), scanned(layers=2))
    assert not result.same_shape
    assert not len(result.heads)
    assert not len(result.layers)
    assert set(result.summary["metric"]) == set(result.metrics) - {"honor"}
    text = render_comparison(result)
    assert "different shapes (3 layers x 4 heads against 2 layers x 4 heads)" in " ".join(text.split())


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("margin", slow_but([{}, {"entropy": 0.5}], {"entropy": 0.5}))
def test_a_screen_ends_with_its_last_line(layers: int, margin: dict[str, float]) -> None:
    result = compare(scanned(), scanned(layers=layers), metrics=["entropy"], equivalence_margin=margin)
    text = render_comparison(result)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\n\n\n" not in text


def with_scores(run: Run, name: str, scores: dict[tuple[int, int], float], spread: float, seed: int) -> Run:
    """The run with values of `name` drawn around each head's score, 0.1 where none is given."""
    noise, table = np.random.default_rng(seed), run.sequences
    for (layer, head), _ in run.heads.groupby(["layer", "head"]):
        rows = (table["layer"] == layer) & (table["head"] == head)
        values = noise.normal(0, spread, int(rows.sum()))
        table.loc[rows, name] = scores.get((layer, head), 0.1) + values - values.mean()
    return run


def places(listed: Listed) -> dict[str, list[tuple[int, int]]]:
    return {name: [(row["layer"], row["head"]) for row in rows] for name, rows in listed.items() if rows}


def test_gained_lost_woke_fell() -> None:
    a, b = scanned(), scanned()
    with_scores(a, "sink_score", {(0, 0): 0.9}, 0.01, 1)
    with_scores(b, "sink_score", {(0, 1): 0.9}, 0.01, 2)
    with_scores(a, "honor", {(0, 0): 0.9, (0, 1): 0.9, (0, 3): 0.9}, 0.01, 3)
    with_scores(b, "honor", {(0, 0): 0.9, (0, 1): 0.9, (0, 2): 0.9}, 0.01, 4)
    result = compare(a, b, metrics=["entropy"])
    expected = {"lost_sink": [(0, 0)], "gained_sink": [(0, 1)], "woke": [(0, 2)], "fell_dormant": [(0, 3)]}
    assert places(result.changes) == expected
    assert not places(result.within_noise)
    assert all(row["q"] < 0.05 for rows in result.changes.values() for row in rows)
    assert json.loads(to_json(result.as_dict()))["changes"]["lost_sink"][0]["metric"] == "sink_score"


@pytest.mark.parametrize("unpaired", [False, True])
def test_a_threshold_crossed_by_noise_is_counted_not_listed(unpaired: bool) -> None:
    """Means on either side of 0.3, a hundredth apart, where single sequences spread by a tenth: nothing holds."""
    a, b = scanned(), scanned(text=1 if unpaired else 0)
    with_scores(a, "sink_score", {(0, 0): 0.295, (1, 1): 0.305, (2, 2): 0.1}, 0.1, 1)
    with_scores(b, "sink_score", {(0, 0): 0.305, (1, 1): 0.295, (2, 2): 0.8}, 0.1, 2)
    result = compare(a, b, paired=not unpaired)
    assert places(result.changes) == {"gained_sink": [(2, 2)]}
    assert places(result.within_noise) == {"gained_sink": [(0, 0)], "lost_sink": [(1, 1)]}
    text = " ".join(render_comparison(result).split())
    assert "; 1 more crossed the threshold without a difference that holds" in text
    assert "lost a sink: none; 1 head crossed the threshold without a difference that holds" in text


def test_a_model_over_other_prose_gains_and_loses_nothing_that_holds() -> None:
    """The same model over other tokens, with a threshold in the middle of its heads."""
    a, b = scanned(), scanned(text=1)
    middle = float(a.heads["sink_score"].median())
    for run in (a, b):
        run.manifest.request = run.manifest.request.model_copy(update={"epsilon": middle})
    result = compare(a, b, paired=False)
    assert not places(result.changes)
    crossed = (a.heads["sink_score"] > middle) != (b.heads["sink_score"] > middle)
    assert sum(map(len, result.within_noise.values())) == crossed.sum() > 0


def test_dormancy_by_rules_on_different_columns_is_not_compared() -> None:
    a, b = scanned(), scanned()
    b.manifest.request = b.manifest.request.model_copy(update={"dormant_rule": "awft>0.5"})
    result = compare(a, b)
    assert any("different columns" in note for note in result.notes)
    assert not places(result.changes)


@pytest.mark.slow
def test_what_one_run_lacks_is_left_out_of_the_default_and_told() -> None:
    softmax, relu = (sinkscope.scan(f"example:trigger-{kind}", num_sequences=20) for kind in ("softmax", "relu"))
    result = compare(softmax, relu)
    assert result.metrics == ["bos_mass", "sink_score", "honor"]
    assert result.notes == [
        "not measured in both runs, so not compared: entropy",
        "B has relu in softmax's place: its sinks are not judged by a threshold",
    ]
    assert result.a["shape"] == "1 layer x 1 head"
    with pytest.raises(SinkscopeError, match="'entropy': not measured in all"):
        compare(softmax, relu, metrics=["entropy"])


def test_a_metric_without_a_value_is_not_unknown() -> None:
    runs = scanned(), scanned()
    for run in runs:
        run.heads["switch_phi"] = np.nan
    with pytest.raises(SinkscopeError, match="'switch_phi' has no value in these runs"):
        compare(*runs, metrics=["switch_phi"])


def test_unknown_metric() -> None:
    with pytest.raises(SinkscopeError, match="unknown metric 'bosmass'"):
        compare(scanned(), scanned(), metrics=["bosmass"])


@pytest.mark.slow
def test_a_thousand_heads_are_compared() -> None:
    run = enlarged(scanned(), 32, 32)
    result = compare(run, run, metrics=[])
    assert len(result.heads) == 1024 * result.heads["metric"].nunique()
    assert result.heads["metric"].nunique() >= 30


def _by_hand() -> Comparison:
    rows = pd.DataFrame([
        {"domain": "prose", "stream": "text", "layer": layer, "head": head, "metric": "bos_mass", "a": 0.5,
         "b": 0.5 + d, "difference": d, "sem": 0.01, "low": d - 0.02, "high": d + 0.02, "p": 0.01, "q": 0.02}
        for layer, heads in enumerate([[0.0, 0.031, -0.052], [np.nan, -0.004, 0.25]]) for head, d in enumerate(heads)
    ])  # fmt: skip
    summary = rows.iloc[[1]].drop(columns=["layer", "head"])
    facts = {"model": "tiny\x1b[1m", "dtype": "float32", "quantization": None, "device": "cpu"}
    facts |= {"shape": "2 layers x 3 heads"}
    facts |= {"sequences": 4, "data": ["prose"], "run": None}
    change = {"layer": 1, "head": 2, "metric": "sink_score", "a": 0.2, "b": 0.45, "q": 0.003}
    changes = {"gained_sink": [change], "lost_sink": [], "woke": [], "fell_dormant": []}
    noise = {"gained_sink": [change] * 9, "lost_sink": [change] * 2, "woke": [], "fell_dormant": []}
    return Comparison(facts, facts, True, True, ["bos_mass"], rows, rows, summary, changes, noise)


SCREEN = """\
A  tiny\\x1b[1m  2 layers x 3 heads, float32 on cpu, 4 sequences of prose
B  tiny\\x1b[1m  2 layers x 3 heads, float32 on cpu, 4 sequences of prose
paired: the same token sequences in both; difference = B - A

mean over all heads
metric      A      B      difference     95 % interval     p
bos_mass  0.5  0.531  +0.031 ± 0.010  +0.011 to +0.051  0.01

difference of bos_mass, in units of 0.01: layers down, heads across
         0   1   2
    0    .  +3  -5
    1    -   . +25

heads that moved most
head  metric      A      B      difference     q
1.2   bos_mass  0.5   0.75  +0.250 ± 0.010  0.02
0.2   bos_mass  0.5  0.448  -0.052 ± 0.010  0.02
0.1   bos_mass  0.5  0.531  +0.031 ± 0.010  0.02
1.1   bos_mass  0.5  0.496  -0.004 ± 0.010  0.02
±: standard error of the difference; p: of its t-test; q: p adjusted over all
heads of a metric and dataset (Benjamini-Hochberg)

gained a sink: 1.2 (0.2 to 0.45, q 0.003); 9 more crossed the threshold without
a difference that holds
lost a sink: none; 2 heads crossed the threshold without a difference that holds
became active (no longer dormant): none
became dormant: none
"""


def test_the_screen() -> None:
    assert render_comparison(_by_hand()) == SCREEN


def test_the_screen_of_a_run_against_itself() -> None:
    """One blank line between its parts, never two."""
    lines = render_comparison(compare(scanned(), scanned())).splitlines()
    place = lines.index("bos_mass: no difference in any head")
    assert (lines[place - 1], lines[place + 1]) == ("", "")
    assert lines[place + 2] == "gained a sink: none"


@pytest.mark.slow
def test_many_domains_fit_on_a_screen() -> None:
    """Thirty domains: the strongest differences first, and how many more there are."""
    a, b = in_domains(scanned(), 30), in_domains(scanned("noise"), 30)
    text = render_comparison(compare(a, b))
    assert len(text.splitlines()) < 80
    assert text.count("layers down") == 4
    assert "and 78 more means (--csv and --json have all)" in text
    assert "and 26 more maps (--csv and --json have all)" in text


def in_domains(run: Run, count: int) -> Run:
    """The run as if it had read `count` domains, with the same values on each."""
    names = [f"d{number}" for number in range(count)]
    for table in ("heads", "layers", "sequences"):
        setattr(run, table, pd.concat([getattr(run, table).assign(domain=name) for name in names], ignore_index=True))
    facts = run.manifest.data[0]
    run.manifest.data = [facts.model_copy(update={"domain": name, "fingerprint": name}) for name in names]
    return run


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.011, 0.051, "+0.011 to +0.051"), (-0.921007, -0.920993, "-0.921007 to -0.920993"), (0.0, 0.0, "+0 to +0"),
     (-0.00014, -7.2e-05, "-0.000140 to -0.000072"), (0.9234, 0.9312, "+0.9234 to +0.9312"), (np.nan, np.nan, "-"),
     (0.5, 0.5, "+0.5 to +0.5"), (-0.2003, -0.166, "-0.200 to -0.166"), (-0.032, -0.0099, "-0.032 to -0.010"),
     (-1e5, -2e4, "-100000 to -20000"), (1e-9, 2e-9, "+1.0e-09 to +2.0e-09"), (-np.inf, np.inf, "-inf to +inf")],
)  # fmt: skip
def test_an_interval_shows_both_its_ends_to_the_same_decimal(low: float, high: float, text: str) -> None:
    assert interval(low, high) == text


@pytest.mark.parametrize("heads", slow_but([4, 32, 64], 4))
def test_no_line_is_too_long(heads: int) -> None:
    run = enlarged(scanned(), 2, heads)
    result = compare(run, run)
    for width in (40, 60, 80, 200):
        text = render_comparison(result, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text, "no cell is cut"


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    scanned("noise").save(tmp_path / "b")
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--metric", "bos_mass", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--csv", str(tmp_path / "c.csv")])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert next(iter(data)) == "schema_version"
    table = pd.read_csv(tmp_path / "c.csv")
    assert table["level"].value_counts().to_dict() == {"head": 12, "layer": 3, "summary": 1}
    scanned(text=1).save(tmp_path / "other")
    refused = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "other")])
    assert refused.exit_code == 2


@pytest.mark.slow
def test_a_model_in_a_runs_place_is_scanned_as_asked(tiny_folder: Path, scan_cli: Scan) -> None:
    run = str(scan_cli(tiny_folder).folder)
    for arguments in ([run, str(tiny_folder)], [str(tiny_folder), run]):
        result = CliRunner().invoke(app, ["compare", *arguments, "--dtype", "bfloat16", "--quiet", "--json"])
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        sides = {Path(data[side]["model"]).name + data[side]["dtype"] for side in "ab"}
        assert sides == {"tinyfloat32", "tinybfloat16"}
        assert data["paired"]


@pytest.mark.parametrize("command", ["compare", "check", "baseline"])
def test_every_command_that_may_scan_has_its_options(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    for option in ("--device", "--dtype", "--trust-remote-code", "--quiet"):
        assert option in text
    assert "spot" not in text.replace("on the spot", "")


def test_means_over_heads_are_over_the_same_heads_in_both_runs() -> None:
    """A value that one run lacks leaves both means: else their difference is no difference of any head."""
    a, b = scanned(), scanned("noise")
    for run, sequences in ((a, [0, 1]), (b, [1, 2])):
        rows = run.sequences
        gone = (rows["layer"] == 1) & (rows["head"] == 2) & rows["sequence"].isin(sequences)
        rows["bos_mass"] = rows["bos_mass"].mask(gone.fillna(False).astype(bool))
    first, second = (
        run.sequences[run.sequences["head"].notna()].pivot_table(
            "bos_mass", ["layer", "sequence"], "head", dropna=False
        )
        for run in (a, b)
    )
    found = compare(a, b, metrics=["bos_mass"])
    by_layer = (second - first).astype(float).mean(axis=1).groupby("layer").mean()
    assert found.layers["difference"].to_numpy() == pytest.approx(by_layer.to_numpy(), abs=1e-12)
    overall = (second - first).astype(float).unstack("layer").mean(axis=1).mean()
    assert found.summary["difference"].to_numpy() == pytest.approx([overall], abs=1e-12)
    assert a.sequences["bos_mass"].isna().sum() == 2 + a.sequences["head"].isna().sum(), "the runs stay as they were"


def test_means_of_separate_samples_are_over_the_same_heads_in_both_runs() -> None:
    """A head without any value in B leaves A's means; one that lacks a value of a sequence stays in both."""
    a, b = scanned(), scanned("noise", text=1)
    head = (b.sequences["layer"] == 1) & (b.sequences["head"] == 2)
    b.sequences["bos_mass"] = b.sequences["bos_mass"].mask(head.fillna(False).astype(bool))
    one = (b.sequences["layer"] == 0) & (b.sequences["head"] == 1) & (b.sequences["sequence"] == 3)
    b.sequences["bos_mass"] = b.sequences["bos_mass"].mask(one.fillna(False).astype(bool))
    found = compare(a, b, metrics=["bos_mass"], paired=False)
    rows = a.sequences[a.sequences["head"].notna()]
    shared = rows[~((rows["layer"] == 1) & (rows["head"] == 2))]
    by_layer = shared.groupby(["layer", "sequence"])["bos_mass"].mean().groupby("layer").mean()
    assert found.layers["a"].to_numpy() == pytest.approx(by_layer.to_numpy(), abs=1e-12)
    overall = shared.groupby("sequence")["bos_mass"].mean().mean()
    assert found.summary["a"].to_numpy() == pytest.approx([overall], abs=1e-12)
    assert np.isnan(found.heads.set_index(["layer", "head"])["difference"].astype(float)[1, 2])
