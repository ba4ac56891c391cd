"""The gate: exit codes, planted changes, policies, the baseline file, what CI systems read."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Scan
from desk import enlarged, hostile, scanned
from junitparser import JUnitXml
from scipy import stats
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.comparison.baseline import baseline_of, baseline_text, read_baseline
from sinkscope.comparison.gate import Breach, Verdict, check
from sinkscope.comparison.policy import DEFAULT, Policy, Rule, read_policy
from sinkscope.errors import SinkscopeError
from sinkscope.present.verdict import github_annotations, junit_xml, markdown_verdict, render_verdict, where
from sinkscope.runs.run import Run, load_run

STRICT = Policy(rules=[Rule(metric="bos_mass", level="head", max_change=0.0)])


def baseline_file(folder: Path) -> Path:
    path = folder / "sinks.json"
    path.write_text(baseline_text(baseline_of(scanned())), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No CI variables of the machine that runs the tests, no pyproject.toml of this repository."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)


def run_check(tmp_path: Path, plant: str, *more: str) -> Any:
    scanned(plant).save(tmp_path / "run", force=True)
    arguments = ["check", str(tmp_path / "run"), "--baseline", str(baseline_file(tmp_path)), *more]
    return CliRunner().invoke(app, arguments)


def test_a_verdict_calls_models_by_the_names_that_their_scans_were_given(tmp_path: Path) -> None:
    run, named = scanned(), scanned()
    named.manifest.request = named.manifest.request.model_copy(update={"name": "Release 7"})
    kept = tmp_path / "named.json"
    kept.write_text(baseline_text(baseline_of(named)), encoding="utf-8")
    verdict = check(run, read_baseline(kept))
    assert (verdict.model, verdict.baseline_model) == (run.manifest.model.id, "Release 7")
    assert f"{run.manifest.model.id} against Release 7" in render_verdict(verdict)


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("dtype", "bfloat16", ("float32 on cpu", "bfloat16 on cpu")),
        ("quantization", "nf4", ("float32 on cpu", "float32 on cpu, quantised (nf4)")),
        ("revision", "1" * 40, ("revision unknown", f"revision {'1' * 40}")),
        ("weights_sha256", "f" * 64, ("weights unknown", f"weights {'f' * 12}")),
    ],
)
def test_two_models_of_one_name_are_told_apart(tmp_path: Path, fact: str, value: str, said: tuple[str, str]) -> None:
    now, before = scanned(), scanned()
    setattr(before.manifest.model, fact, value)
    kept = tmp_path / "before.json"
    kept.write_text(baseline_text(baseline_of(before)), encoding="utf-8")
    verdict = check(now, read_baseline(kept), Policy(rules=[Rule(metric="bos_mass", level="head", max_change=1.0)]))
    told = " ".join(render_verdict(verdict).split())
    assert told.startswith(f"passed: tiny ({said[0]}) against tiny ({said[1]}): ")
    assert check(now, baseline_of(now), STRICT).model == "tiny", "nothing tells them apart"


def test_the_rounding_of_the_file_is_no_change(tmp_path: Path) -> None:
    """A policy that lets nothing move passes the run that the baseline was written from, and no other."""
    nothing = Policy(rules=[Rule(metric=name, level="layer", max_change=0.0) for name in ("bos_mass", "inf_norm")])
    kept = read_baseline(baseline_file(tmp_path))
    verdict = check(scanned(), kept, nothing)
    assert verdict.passed
    assert [tally.largest for tally in verdict.tallies] == [0.0, 0.0]
    assert not check(scanned("noise"), kept, nothing).passed
    moved = scanned()
    moved.sequences["inf_norm"] *= 1 + 1e-4
    assert len(check(moved, kept, nothing).breaches) == 3


def test_a_rule_that_judges_nothing_is_named() -> None:
    """It could not fail: without a word, a check that passes reads as if the rule held."""
    other = scanned(text=1)
    before, now = scanned(), scanned()
    for run in (before, now, other):
        later = run.sequences["sequence"] > 0
        run.sequences["matrix_entropy"] = run.sequences["matrix_entropy"].mask(later)
    rules = [Rule(metric=name, level="layer", max_change=1e6) for name in ("bos_mass", "matrix_entropy")]
    domain = other.manifest.data[0].domain
    verdict = check(other, baseline_of(before), Policy(rules=rules))
    said = f"{domain}: matrix_entropy at level layer judged nothing: one sequence alone has a value"
    assert verdict.passed
    assert any(note.startswith(said) for note in verdict.notes)
    assert not any("judged nothing" in note for note in check(now, baseline_of(before), Policy(rules=rules)).notes)
    assert said.partition(":")[0] in render_verdict(verdict)


def test_exit_codes(tmp_path: Path) -> None:
    assert run_check(tmp_path, "").exit_code == 0
    failed = run_check(tmp_path, "zero head")
    assert failed.exit_code == 1
    assert failed.stdout.startswith("FAILED")
    assert run_check(tmp_path, "", "--policy", "none.toml").exit_code == 2
    missing = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--baseline", "none.json"])
    assert missing.exit_code == 2


@pytest.mark.slow
def test_file_and_run_give_the_same_verdict() -> None:
    exact = baseline_of(scanned())
    path = Path("b.json")
    path.write_text(baseline_text(exact), encoding="utf-8")
    for plant in ("zero head", "noise"):
        found = [check(scanned(plant), each).breaches for each in (exact, read_baseline(path))]
        assert [(b.metric, b.place) for b in found[0]] == [(b.metric, b.place) for b in found[1]]


def test_a_zeroed_head_is_named() -> None:
    verdict = check(scanned("zero head"), baseline_of(scanned()))
    places = {(breach.metric, breach.place) for breach in verdict.breaches}
    assert ("residual_write_ln", "layer 1 head 0") in places
    text = render_verdict(verdict)
    line = next(line for line in text.splitlines() if line.startswith("  residual_write_ln at layer 1 head 0"))
    assert "-> 0 (" in line
    assert "allowed ±0.005" in line


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([0, 1, None], "2 heads moved in 1 layer, 2 other layers moved"),
        ([0], "1 head moved in 1 layer, 2 other layers moved"),
        ([None], "3 layers moved"),
    ],
)
def test_the_layers_of_heads_are_counted_apart(heads: list[int | None], said: str) -> None:
    places = [(0, None), (1, None), *((2, head) for head in heads)]
    breaches = [Breach("bos_mass", "head", "prose", "text", layer, head, 0.1, 0.9, 0.2, None) for layer, head in places]
    first, _ = where(SimpleNamespace(breaches=breaches))  # type: ignore[arg-type]
    assert first == f"first moved: layer 0 (bos_mass); {said}"


def test_the_screen_says_first_where_the_change_began_and_what_is_worst() -> None:
    """Layer 1's head 0 was zeroed: layer 2 reads what it wrote, layer 0 does not."""
    verdict = check(scanned("zero head"), baseline_of(scanned()))
    text = render_verdict(verdict)
    assert max(map(len, text.splitlines()[1:])) <= 80, "the first line is one line"
    lines = text.replace("\n  heads", " heads").splitlines()
    heads = {(breach.layer, breach.head) for breach in verdict.breaches if breach.head is not None}
    assert lines[1].startswith("first moved: layer 1 (")
    assert lines[1].endswith(f"; {len(heads)} heads moved in 2 layers")
    worst = max(verdict.breaches, key=lambda each: abs((each.now or 0) - (each.baseline or 0)) / each.allowed)
    assert lines[2].startswith(f"worst: {worst.metric} at {worst.place}, ")
    assert sum(line.startswith("  ") and " at " in line for line in lines) <= 11
    assert lines[-1].endswith("more (--json or --junit lists them all)")


@pytest.mark.parametrize("plant", ["zero head", "noise", "no bos"])
def test_planted_changes_fail_over_the_same_or_almost_the_same_text(plant: str) -> None:
    assert not check(scanned(plant), baseline_of(scanned())).passed


@pytest.mark.slow
def test_the_same_model_passes_in_half_precision_and_over_other_text() -> None:
    baseline = baseline_of(scanned())
    assert check(scanned(), baseline, STRICT).passed
    assert check(scanned(dtype="bfloat16"), baseline).passed
    other = check(scanned(text=3), baseline)
    assert other.same_text == {next(iter(other.same_text)): False}
    assert other.passed
    assert any("other token sequences" in note for note in other.notes)


def test_a_run_of_another_length_than_the_baselines_is_told() -> None:
    run, baseline = scanned(text=3), baseline_of(scanned())
    assert not any("length" in note for note in check(run, baseline).notes)
    length, run.manifest.data[0].seq_len = run.manifest.data[0].seq_len, 99
    told = f"the sequences differ in length (99 tokens in the run, {length} tokens in the baseline)."
    assert sum(told in note for note in check(run, baseline).notes) == 1


def test_bounds_hold_at_every_level() -> None:
    run, baseline = scanned(), baseline_of(scanned())
    is_head = run.sequences["head"].notna()
    run.sequences.loc[is_head, "bos_mass"] += 0.01
    for level in ("summary", "layer", "head"):
        for bound, passed in ((0.0099, False), (0.0101, True)):
            rule = Rule(metric="bos_mass", level=level, max_change=bound)  # type: ignore[arg-type]
            assert check(run, baseline, Policy(rules=[rule])).passed is passed


def test_relative_and_absolute_the_larger_allows() -> None:
    run, baseline = scanned(), baseline_of(scanned())
    run.sequences["entropy"] *= 1.04
    for relative, absolute, passed in ((0.05, None, True), (0.03, None, False), (0.03, 10.0, True), (0.05, 0.0, True)):
        rule = Rule(metric="entropy", level="head", max_relative_change=relative, max_change=absolute)
        assert check(run, baseline, Policy(rules=[rule])).passed is passed


def test_bounds_are_tighter_where_nothing_was_rounded() -> None:
    run, baseline = scanned(), baseline_of(scanned())
    run.sequences["bos_mass"] += 0.01
    policy = Policy(same_precision=0.1, rules=[Rule(metric="bos_mass", level="head", max_change=0.03)])
    verdict = check(run, baseline, policy)
    assert verdict.breaches[0].allowed == pytest.approx(0.003)
    told = "bounds are 0.1 x those of the policy (same_precision): both runs are float32 over the same text"
    assert told in " ".join(render_verdict(verdict).split())
    run.manifest.model.dtype = "bfloat16"
    assert check(run, baseline, policy).passed


def test_a_value_that_vanished_fails() -> None:
    run, baseline = scanned(), baseline_of(scanned())
    rows = (run.sequences["layer"] == 2) & (run.sequences["head"] == 1)
    run.sequences.loc[rows, "bos_mass"] = np.nan
    verdict = check(run, baseline, STRICT)
    assert [breach.place for breach in verdict.breaches] == ["layer 2 head 1"]
    assert "missing on one side" in render_verdict(verdict)
    assert "1 of 12 comparisons moved too far" in render_verdict(verdict)  # the place is one of those judged


@pytest.mark.parametrize(("text", "sequences", "noted"), [(0, 8, True), (1, 8, True), (0, 1, True), (1, 1, False)])
def test_means_over_other_heads_than_the_baselines_are_noted(text: int, sequences: int, noted: bool) -> None:
    """A head that lacks all values, or over the same text some, is in the mean of one side alone."""
    run, baseline = scanned(text=text), baseline_of(scanned())
    rows = run.sequences
    lacking = (rows["layer"] == 2) & (rows["head"] == 1) & (rows["sequence"] < sequences)
    rows["bos_mass"] = rows["bos_mass"].mask(lacking.fillna(False).astype(bool))
    policy = Policy(rules=[Rule(metric="bos_mass", level=level, max_change=1.0) for level in ("layer", "summary")])
    said = [note for note in check(run, baseline, policy).notes if "other heads" in note]
    expected = (
        "token ids: bos_mass at level {} is a mean over other heads than the baseline's: 1 head has values that one "
        "side lacks"
    )
    assert said == ([expected.format(level) for level in ("layer", "summary")] if noted else [])


def test_more_breaches_than_comparisons_are_none() -> None:
    """It said `12 of 0 comparisons moved too far`."""
    run, baseline = scanned(), baseline_of(scanned())
    run.sequences["bos_mass"] = np.nan
    assert "12 of 12 comparisons moved too far" in render_verdict(check(run, baseline, STRICT))


@pytest.mark.slow
def test_false_alarms_over_other_text_are_rare() -> None:
    """60 samples against one from the same distribution at significance 0.01: an alarm or two, not ten."""
    run = scanned()
    noise = np.random.default_rng(0)
    rule = Policy(significance=0.01, rules=[Rule(metric="bos_mass", level="head", max_change=0.0)])
    alarms = 0
    for data in run.manifest.data:
        data.fingerprint = "a"
    is_head = run.sequences["head"].notna()
    run.sequences.loc[is_head, "bos_mass"] = noise.normal(0.4, 0.05, is_head.sum())
    baseline = baseline_of(run)
    for data in run.manifest.data:
        data.fingerprint = "b"
    for _ in range(60):
        run.sequences.loc[is_head, "bos_mass"] = noise.normal(0.4, 0.05, is_head.sum())
        alarms += not check(run, baseline, rule).passed
    assert alarms <= 6
    run.sequences["bos_mass"] += 0.5
    assert len(check(run, baseline, rule).breaches) == 12


def redrawn(run: Run, noise: np.random.Generator, means: pd.DataFrame, spread: float, text: str) -> Run:
    """The run as if over other text: every value drawn anew around its place's mean."""
    run.sequences[means.columns] = means * (1 + spread * noise.standard_normal(means.shape))
    for data in run.manifest.data:
        data.fingerprint = text
    return run


def false_alarms(policy: Policy, spread: float, checks: int) -> int:
    """How many of `checks` fail though every value comes from the same distribution."""
    noise, run = np.random.default_rng(5), scanned()
    table = run.sequences
    names = [rule.metric for rule in policy.rules]
    means = table.groupby(table["layer"] * 100 + table["head"].fillna(99))[list(dict.fromkeys(names))].transform("mean")
    alarms = 0
    for _ in range(checks):
        baseline = baseline_of(redrawn(run, noise, means, spread, "a"))
        alarms += not check(redrawn(run, noise, means, spread, "b"), baseline, policy).passed
    return alarms


@pytest.mark.slow
def test_false_alarms_of_the_default_policy() -> None:
    """A thousandth is allowed; 5 % of spread between sequences is what real heads have."""
    assert false_alarms(DEFAULT, 0.05, 100) <= 1


@pytest.mark.slow
def test_the_significance_holds_for_the_whole_check() -> None:
    """Seven rules that allow nothing: 5 % of checks fail, not 5 % for each rule (which would be some 30 %)."""
    names = ["bos_mass", "entropy", "honor", "self_mass", "previous_mass", "residual_write_ln", "qk_cos_first"]
    rules = [Rule(metric=name, level="head", max_change=0.0) for name in names]
    alarms = false_alarms(Policy(significance=0.05, rules=rules), 0.05, 200)
    assert alarms <= 10 + 3 * np.sqrt(200 * 0.05 * 0.95)
    assert alarms > 0


def test_q_is_benjamini_hochberg_over_all_rules_by_hand() -> None:
    run, baseline = scanned(text=1), baseline_of(scanned())
    names = ("bos_mass", "entropy")
    rules = [Rule(metric=name, level="head", max_change=0.0) for name in names]
    p = []
    for name in names:
        for layer in range(3):
            for head in range(4):
                now, then = (
                    each.sequences[(each.sequences["layer"] == layer) & (each.sequences["head"] == head)][name]
                    for each in (run, scanned())
                )
                p.append(stats.ttest_ind(now, then, equal_var=False).pvalue)
    order = np.argsort(p)
    q = np.empty(len(p))
    lowest = 1.0
    for rank in range(len(p), 0, -1):
        lowest = min(lowest, p[order[rank - 1]] * len(p) / rank)
        q[order[rank - 1]] = lowest
    verdict = check(run, baseline, Policy(significance=1.0, rules=rules))
    ours = {(b.metric, b.layer, b.head): b.q for b in verdict.breaches}
    places = [(name, layer, head) for name in names for layer in range(3) for head in range(4)]
    theirs = {place: value for place, value in zip(places, q, strict=True) if value < 1}
    assert ours == {place: pytest.approx(value, rel=1e-9) for place, value in theirs.items()}


def test_what_cannot_be_judged_is_refused() -> None:
    """One sequence has no standard error: over other text it would pass whatever it says."""
    run = scanned(text=1)
    run.sequences = run.sequences[run.sequences["sequence"] == 0]
    with pytest.raises(SinkscopeError, match=r"at least 2 sequences \(1 in the run, 8 in the baseline\)"):
        check(run, baseline_of(scanned()))
    cut = scanned()
    cut.manifest.complete = False
    with pytest.raises(SinkscopeError, match="was interrupted"):
        check(cut, baseline_of(scanned()))


@pytest.mark.parametrize("name", ["matrix_entropy", "rank_output"])
def test_spectra_of_other_sequences_are_no_breach(name: str) -> None:
    """The same text, but spectra of fewer of its sequences: nothing moved, and no verdict can be given."""
    run, policy = scanned(), Policy(rules=[Rule(metric=name, level="layer", max_change=1e-9)])
    if name not in run.sequences:
        run.sequences[name] = run.sequences["bos_mass"]
    baseline = baseline_of(run)
    assert check(run, baseline, policy).passed
    run.sequences.loc[run.sequences["sequence"] >= 2, name] = np.nan
    with pytest.raises(SinkscopeError, match="scan with the baseline's --spectra, or write a new baseline"):
        check(run, baseline, policy)


def test_counts_of_values_survive_the_file() -> None:
    """Degrees of freedom come from the sequences that have a value, not from all."""
    run = scanned()
    table = run.sequences
    table.loc[(table["layer"] == 1) & (table["head"] == 2) & (table["sequence"] < 5), "bos_mass"] = np.nan
    exact = baseline_of(run)
    Path("b.json").write_text(baseline_text(exact), encoding="utf-8")
    for each in (exact, read_baseline(Path("b.json"))):
        level = next(level for (_, name), level in each.levels.items() if name == "head")
        assert level.counts("bos_mass").tolist() == [8.0] * 6 + [3.0] + [8.0] * 5
        assert level.counts("entropy").tolist() == [8.0] * 12


def test_as_many_heads_in_other_layers_are_told_apart() -> None:
    """18 x 4 heads against 6 x 12: the number of heads alone says that nothing differs."""
    narrow, wide = enlarged(scanned(), 6, 2), enlarged(scanned(), 2, 6)
    with pytest.raises(
        SinkscopeError, match=r"\(12 of text in 2 layers at level head against 12 of text in 6 layers\)"
    ):
        check(wide, baseline_of(narrow), STRICT)


def test_a_folder_that_is_no_run_is_no_baseline(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--baseline", str(tmp_path / "empty")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "empty is no baseline: it is a folder, and no run's; give a file of `sinkscope baseline`" in result.stderr


@pytest.mark.slow
def test_other_shapes_and_other_data_are_bad_input() -> None:
    with pytest.raises(SinkscopeError, match="other layers or heads"):
        check(scanned(layers=2), baseline_of(scanned()))
    run = scanned(text=1)
    for data in run.manifest.data:
        data.domain = "elsewhere"
    run.sequences["domain"] = "elsewhere"
    with pytest.raises(SinkscopeError, match="lacks the baseline's data"):
        check(run, baseline_of(scanned()))


def test_a_gate_with_nothing_to_compare_is_bad_input(tmp_path: Path) -> None:
    """No data named, data that no sequence belongs to, no value on either side: none of them is a passed check."""
    scanned().save(tmp_path / "run")
    path = baseline_file(tmp_path)
    path.write_text(re.sub(r'^"data": .*', '"data": [],', path.read_text(), flags=re.M))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--baseline", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the baseline names no data" in result.stderr
    stray, empty = scanned(), scanned()
    stray.sequences["domain"] = "elsewhere"
    with pytest.raises(SinkscopeError, match="has no sequence of the data its manifest names"):
        baseline_of(stray)
    empty.sequences.loc[empty.sequences["head"].notna(), "bos_mass"] = np.inf  # a baseline keeps no infinite mean
    with pytest.raises(SinkscopeError, match="nothing was compared"):
        check(empty, baseline_of(empty), STRICT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = [{metric='bosmass', level='head', max_change=1}]", "unknown metric 'bosmass'"),
        ("rules = [{metric='bos_mass', level='head', max_chang=1}]", "max_chang: unknown key"),
        ("rule = []", r"rules: missing$"),
        ("rules = []", "rules: needs at least 1$"),
        ("rules = [{metric='bos_mass', level='heads', max_change=1}]", "level: must be 'summary', 'layer' or 'head'"),
        ("rules = [{metric='bos_mass', level='head'}]", "give max_change or max_relative_change"),
        ("rules = [{metric='bos_mass', level='head', max_change=-1}]", "greater than or equal to 0"),
        ("rules = [{metric='norm_first', level='head', max_change=1}]", "no values at level head"),
        (
            "rules = [{metric='bos_mass', level='head', max_change=true}]",
            r"^p.toml: rules\[0\].max_change: must be a valid number, not True$",
        ),
        ("rules = [{metric='bos_mass', level='head', max_relative_change='1'}]", "must be a valid number, not '1'$"),
        ("same_precision = true\nrules = [{metric='bos_mass', level='head', max_change=1}]", "same_precision: must be"),
        ("rules = [", "not TOML"),
    ],
)
def test_bad_policies_are_refused(text: str, message: str) -> None:
    Path("p.toml").write_text(text)
    with pytest.raises(SinkscopeError, match=message):
        read_policy(Path("p.toml"))


def test_a_policy_may_name_what_its_baseline_holds() -> None:
    """A metric of a user's own, at the levels the baseline has it; a name that neither knows is refused."""
    run = scanned()
    run.sequences["mine"] = run.sequences["bos_mass"]
    run.sequences["layers_own"] = run.sequences["inf_norm"]
    baseline = baseline_of(run)
    path = Path("p.toml")
    path.write_text(
        "rules = [{metric='mine', level='head', max_change=1}, {metric='layers_own', level='layer', max_change=1}]"
    )
    assert [rule.metric for rule in read_policy("p.toml", baseline=baseline).rules] == ["mine", "layers_own"]
    with pytest.raises(SinkscopeError, match="unknown metric 'mine'; `sinkscope metrics`"):
        read_policy(path)
    with pytest.raises(SinkscopeError, match="unknown metric 'mine': the baseline does not hold it"):
        read_policy(path, baseline=baseline_of(scanned()))
    path.write_text("rules = [{metric='layers_own', level='head', max_change=1}]")
    with pytest.raises(SinkscopeError, match="layers_own is a layer metric: it has no values at level head"):
        read_policy(path, baseline=baseline)


def test_a_policy_is_judged_before_anything_is_scanned() -> None:
    Path("b.json").write_text(baseline_text(baseline_of(scanned())), encoding="utf-8")
    Path("p.toml").write_text("rules = [{metric='mine', level='head', max_change=1}]")
    result = CliRunner().invoke(app, ["check", "no/such-model", "--baseline", "b.json", "--policy", "p.toml"])
    assert result.exit_code == 2
    assert "unknown metric 'mine': the baseline does not hold it" in result.stderr


def test_the_policy_of_pyproject() -> None:
    assert read_policy(None) is DEFAULT
    Path("pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert read_policy(None) is DEFAULT
    rules = "[[tool.sinkscope.check.rules]]\nmetric = 'entropy'\nlevel = 'layer'\nmax_relative_change = 0.1\n"
    Path("pyproject.toml").write_text(f"[tool.sinkscope.check]\nsignificance = 0.01\n{rules}")
    policy = read_policy(None)
    assert policy.significance == 0.01
    assert policy.rules == [Rule(metric="entropy", level="layer", max_relative_change=0.1)]
    assert read_policy(Path("pyproject.toml")) == policy


@pytest.mark.slow
def test_baseline_of_a_thousand_heads_is_under_a_megabyte(tmp_path: Path) -> None:
    text = baseline_text(baseline_of(enlarged(scanned(), 32, 32)))
    assert len(text.encode()) < 1_000_000
    assert next(iter(json.loads(text))) == "schema_version"
    path = tmp_path / "b.json"
    path.write_text(text, encoding="utf-8")
    assert len(read_baseline(path).levels) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "sinkscope baseline", "schema_version": 99}',
                                  '{"kind": "sinkscope baseline", "schema_version": 1}'])  # fmt: skip
def test_damaged_baselines_are_refused(text: str) -> None:
    Path("b.json").write_text(text)
    with pytest.raises(SinkscopeError, match=r"b\.json"):
        read_baseline(Path("b.json"))


def verdict_of(plant: str) -> Verdict:
    return check(scanned(plant), baseline_of(scanned()), STRICT)


def test_junit_is_read_back(tmp_path: Path) -> None:
    result = run_check(tmp_path, "zero head", "--junit", str(tmp_path / "j.xml"))
    assert result.exit_code == 1
    suite = next(iter(JUnitXml.fromfile(str(tmp_path / "j.xml"))))
    assert suite.tests == len(DEFAULT.rules)
    assert 0 < suite.failures <= suite.tests
    failed = [case for case in suite if case.result]
    assert len(failed) == suite.failures
    assert "allowed" in failed[0].result[0].text


@pytest.mark.slow
def test_the_run_of_a_model_is_kept(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    """Also where the check fails; not where there is no new run, or no place for it."""
    base = scan_cli(tiny_folder).folder
    words = ["check", str(tiny_folder), "--baseline", str(base), "--quiet"]
    kept = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "kept")])
    assert kept.exit_code == 0, kept.output
    pd.testing.assert_frame_equal(load_run(tmp_path / "kept").heads, load_run(base).heads)
    for refused, said in (
        ([*words, "--out", str(tmp_path / "kept")], "holds a finished run: give another --out\n"),
        (["check", str(base), "--baseline", str(base), "--out", str(tmp_path / "new")], "is a run folder already"),
    ):
        result = CliRunner().invoke(app, refused)
        assert result.exit_code == 2
        assert said in result.stderr
    assert not (tmp_path / "new").exists()


def test_github_gets_ten_errors_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = run_check(tmp_path, "zero head", "--json")
    assert json.loads(result.stdout)["passed"] is False, "stdout holds the JSON alone"
    assert 0 < result.stderr.count("::error ") <= 10
    text = summary.read_text()
    assert text.startswith("before\n### sinkscope check: failed")
    assert "| residual_write_ln | layer 1 head 0 |" in text
    assert "::error " in run_check(tmp_path, "zero head").stdout, "where the runner looks for it"


@pytest.mark.parametrize(("plant", "code"), [("", 0), ("zero head", 1)])
def test_a_summary_that_cannot_be_written_is_a_warning(
    plant: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict alone decides the exit code."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "x"))
    result = run_check(tmp_path, plant)
    assert result.exit_code == code
    assert result.stderr.startswith("sinkscope: warning: the step's summary (GITHUB_STEP_SUMMARY) cannot be written")
    assert len(result.stderr.splitlines()) == 1


def test_annotations_stay_ten() -> None:
    run = scanned()
    run.sequences["bos_mass"] += 0.1
    text = github_annotations(check(run, baseline_of(scanned()), STRICT))
    assert text.count("::error ") == 10
    assert "and 3 more" in text


def test_names_are_data() -> None:
    evil = "x\n::error::y|<b>\x1b[1m%0A]]>&"
    run, base = hostile(scanned(), evil), hostile(scanned(), evil)
    run.sequences["stream"] = base.sequences["stream"] = evil
    run.sequences["bos_mass"] += 0.1
    verdict = check(run, baseline_of(base), STRICT)
    for text in (render_verdict(verdict), markdown_verdict(verdict), github_annotations(verdict)):
        assert "\n::error::y" not in text
        assert "\x1b" not in text
    assert "<b>" not in markdown_verdict(verdict)
    ElementTree.fromstring(junit_xml(verdict))


def test_same_model_at_other_batch_size_passes_the_defaults() -> None:
    assert verdict_of("").passed
    assert not verdict_of("noise").passed
