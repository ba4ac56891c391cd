"""Runs and baselines of sinkscope 0.2 are read, and never held against new ones where alpha_k meant something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import random_ids, tiny

import sinkscope
from sinkscope.comparison.baseline import Baseline, baseline_of, baseline_text, read_baseline
from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy, Rule
from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import BY_ALPHA, hides_keys
from sinkscope.runs.run import load_run

OLD = Path(__file__).parents[1] / "fixtures" / "v0_2"
FAMILIES = {"windowed": "mistral", "plain": "llama"}
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1} | dict.fromkeys(
    ("hidden_size", "intermediate_size"), 16
)
ALPHA = Policy(rules=[Rule(metric="sinks_per_sequence", level="head", max_change=0.1)])
MASS = Policy(rules=[Rule(metric="sink_score", level="head", max_change=0.1)])


@pytest.fixture(scope="module")
def runs() -> dict[str, sinkscope.Run]:
    """The same models and tokens, scanned now."""
    return {
        name: sinkscope.scan(tiny(family, **SIZES), data=random_ids(2, 40), self_check=False, epsilon=0.1)
        for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_keeps_its_version(name: str, tmp_path: Path) -> None:
    run = load_run(OLD / name)
    assert run.manifest.schema_version == run.summary.schema_version == 2
    assert hides_keys(run.manifest) == (name == "windowed")
    run.save(tmp_path / "again")
    assert load_run(tmp_path / "again").manifest.schema_version == 2
    facts = read_again(baseline_text(baseline_of(run)), tmp_path).facts
    assert (facts.schema_version, facts.hides) == (2, name == "windowed")


def read_again(text: str, folder: Path) -> Baseline:
    (folder / "baseline.json").write_text(text, "utf-8")
    return read_baseline(folder / "baseline.json")


def test_a_new_run_records_what_its_masks_hide(runs: dict[str, sinkscope.Run]) -> None:
    for name, run in runs.items():
        assert (run.manifest.schema_version, run.summary.schema_version) == (3, 3)
        assert [site.hides for site in run.manifest.attention] == [name == "windowed"]


@pytest.mark.slow
def test_compare_leaves_out_or_refuses_what_moved(runs: dict[str, sinkscope.Run]) -> None:
    old = {name: load_run(OLD / name) for name in FAMILIES}
    for pair in ((old["windowed"], runs["windowed"]), (runs["windowed"], old["windowed"])):
        assert compare(*pair).summary["difference"].abs().max() < 1e-6
        with pytest.raises(
            SinkscopeError, match="sinks_per_sequence: measured otherwise where the schema version is 2"
        ):
            compare(*pair, metrics=["sink_score", "sinks_per_sequence"])
        every = compare(*pair, metrics=[])
        assert not set(BY_ALPHA) & set(every.metrics)
        assert "so not compared: sinks_per_sequence, sink_elsewhere" in every.notes[0]
        assert every.heads["difference"].abs().max() < 1e-4
    plain = compare(old["plain"], runs["plain"], metrics=["sinks_per_sequence", "sink_elsewhere"])
    assert plain.heads["difference"].abs().max() == 0
    assert plain.notes == []
    windowed = compare(runs["windowed"], runs["windowed"], metrics=["sinks_per_sequence"])
    assert windowed.heads["difference"].abs().max() == 0


def test_the_gate_refuses_what_moved(runs: dict[str, sinkscope.Run], tmp_path: Path) -> None:
    old = {name: load_run(OLD / name) for name in FAMILIES}
    of_old = read_again(baseline_text(baseline_of(old["windowed"])), tmp_path)
    file = json.loads((tmp_path / "baseline.json").read_text("utf-8"))
    del file["hides"]  # as 0.2 wrote it
    as_written = read_again(json.dumps(file), tmp_path)
    for run, baseline in (
        (runs["windowed"], of_old), (runs["windowed"], as_written), (old["windowed"], baseline_of(runs["windowed"])),
    ):  # fmt: skip
        assert check(run, baseline, MASS).passed
        with pytest.raises(SinkscopeError, match=r"sinks_per_sequence: .* write the baseline again"):
            check(run, baseline, ALPHA)
    assert check(runs["plain"], baseline_of(old["plain"]), ALPHA).passed
    assert check(old["plain"], baseline_of(runs["plain"]), ALPHA).passed


@pytest.mark.slow
def test_no_table_of_several_runs_mixes_what_moved(runs: dict[str, sinkscope.Run], tmp_path: Path) -> None:
    """By one rule: old runs with a window beside new runs, whatever these are; old runs by themselves agree."""
    from sinkscope.present.card import dataset_files
    from sinkscope.runs.atlas import atlas, left_out
    from sinkscope.runs.paper_table import paper_table

    old = {name: load_run(OLD / name) for name in FAMILIES}
    reason = "measured otherwise where the schema version is 2 or older"
    for new in runs.values():
        together = [old["windowed"], new]
        for level, name in (("head", "sinks_per_sequence"), ("head", "peak_position"), ("head", "peak_score")):
            with pytest.raises(SinkscopeError, match=f"{name}: {reason}"):
                paper_table(together, level, [name])
        assert len(paper_table(together).frame) == 2, "the metrics that a table has by default did not move"
        with pytest.raises(SinkscopeError, match=reason):
            dataset_files(together)
    for alike in ([old["windowed"], old["plain"]], [old["plain"], *runs.values()]):
        assert len(paper_table(alike, "head", ["sinks_per_sequence"]).frame)
        assert dataset_files(alike)
        assert left_out(alike) == []
    assert left_out([old["windowed"], runs["plain"]]) == [], "it did not measure what moved"
    measured = {"heads": 2, "missing": 0, "sinks_on_bos": 2, "of_sinks_on_bos": {"token": 2}}
    for run in (old["windowed"], runs["plain"]):
        run.summary.streams["text"].measured["first"] = measured
    (line,) = left_out([old["windowed"], runs["plain"]])
    assert "position_or_token of windowed is left out" in line
    own, other = atlas([old["windowed"], runs["plain"]])
    assert (own.values["position_or_token"], other.values["position_or_token"]) == (None, "token (2 of 2)")
    assert atlas([old["windowed"]])[0].values["position_or_token"] == "token (2 of 2)"
