"""Which sequences of two runs are held against each other, why not, and what a baseline must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import scanned
from typer.testing import CliRunner

from sinkscope import SinkscopeError
from sinkscope.cli import app
from sinkscope.comparison.baseline import baseline_of, read_baseline
from sinkscope.comparison.compare_runs import compare, describe_shape
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.runs.run import Run


def with_domains(*names: str, text: int = 0) -> Run:
    """A run over several domains, a few sequences each; `text` tells their fingerprints apart."""
    run = scanned(text=text)
    (only,) = run.manifest.data
    run.manifest.data = [
        only.model_copy(update={"domain": name, "fingerprint": f"{name} {text}", "sequences": 4}) for name in names
    ]
    run.sequences["domain"] = np.array(names)[run.sequences["sequence"] * len(names) // 8]
    return run


def test_separate_samples_of_several_domains_are_matched_by_name() -> None:
    found = compare(with_domains("x", "y"), with_domains("y", "z", text=1), paired=False)
    assert set(found.summary["domain"]) == {"y"}
    with pytest.raises(
        SinkscopeError, match=r"the runs share no dataset \(x, y against z, w\): datasets of one name are compared"
    ):
        compare(with_domains("x", "y"), with_domains("z", "w", text=1), paired=False)


@pytest.mark.parametrize("turned", [False, True])
def test_datasets_that_only_one_run_has_are_named_in_either_order(turned: bool) -> None:
    """A run with more datasets was refused as A, and compared as B."""
    more, fewer = with_domains("x", "y"), with_domains("x")
    a, b = (more, fewer) if turned else (fewer, more)
    result = compare(a, b)
    assert result.paired
    assert set(result.summary["domain"]) == {"x"}
    assert f"only {'A' if turned else 'B'} has y: not compared" in result.notes
    both = compare(with_domains("x", "y"), with_domains("x", "z"))
    assert both.notes == ["only A has y: not compared", "only B has z: not compared"]


def test_a_dataset_of_one_name_with_other_tokens_is_refused_beside_others() -> None:
    a, b = with_domains("x", "y"), with_domains("x", "y")
    b.manifest.data[1].fingerprint = "another"
    for first, second in ((a, b), (b, a)):
        with pytest.raises(SinkscopeError, match=r"of 'y' differ \(their fingerprints differ, their settings do not\)"):
            compare(first, second)


def test_a_dataset_that_an_interrupted_run_did_not_reach_is_not_said_to_differ() -> None:
    a, b = with_domains("x", "y"), with_domains("x", "y")
    b.sequences = b.sequences[b.sequences["domain"] == "x"]
    for first, second, side in ((a, b, "A"), (b, a, "B")):
        assert compare(first, second).notes == [f"only {side} has y: not compared"]
    b.sequences = b.sequences.assign(domain="y")
    a.sequences = a.sequences[a.sequences["domain"] == "x"]
    with pytest.raises(SinkscopeError, match="the runs read different data: x against y;"):
        compare(a, b)


def test_why_runs_are_not_paired() -> None:
    with pytest.raises(
        SinkscopeError, match=r"the runs read different data: x, y against z, w; compare\(\.\.\., paired=False\)"
    ):
        compare(with_domains("x", "y"), with_domains("z", "w", text=1))
    other = with_domains("x", "y", text=1)
    other.manifest.data[0].seq_len = 99
    with pytest.raises(SinkscopeError, match=r"sequences of 'x' differ \(tokens a sequence: 48 against 99\)"):
        compare(with_domains("x", "y"), other)


def test_two_tokenizers_are_named_as_the_cause_and_each_door_speaks_its_language(tmp_path: Path) -> None:
    """The first token of the one is no BOS and differs between its sequences: None says nothing to a reader."""
    a, b = scanned(), scanned(text=1)
    b.manifest.model.tokenizer_sha256, a.manifest.model.tokenizer_sha256 = "b", "a"
    a.manifest.first_token = a.manifest.first_token.model_copy(update={"id": None, "text": None})
    cause = "the runs' models have two tokenizers, which cut the text of 'token ids' into different tokens; "
    with pytest.raises(SinkscopeError) as refused:
        compare(a, b)
    assert str(refused.value) == f"{cause}compare(..., paired=False) compares separate samples"
    for run, name in ((a, "a"), (b, "b")):
        run.save(tmp_path / name)
    typed = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert typed.exit_code == 2
    assert typed.stderr == f"sinkscope: error: {cause}--unpaired compares separate samples\n"
    b.manifest.model.tokenizer_sha256 = "a"
    with pytest.raises(SinkscopeError, match="first token: one that differs between sequences against"):
        compare(a, b)


def test_honor_is_compared_by_head_alone() -> None:
    """Its mean over a layer's heads is 1 by definition: a row of it would say that nothing changed."""
    found = compare(scanned(), scanned("noise"), metrics=["bos_mass", "honor", "residual_write_ln"])
    assert set(found.summary["metric"]) == set(found.layers["metric"]) == {"bos_mass"}
    assert set(found.heads["metric"]) == {"bos_mass", "honor", "residual_write_ln"}
    alone = compare(scanned(), scanned("noise"), metrics=["honor"])
    assert "heads that moved most" in render_comparison(alone)


def test_runs_that_judge_by_other_rules_are_told() -> None:
    run = scanned()
    run.manifest.request = run.manifest.request.model_copy(update={"epsilon": 0.2, "dormant_rule": "honor<0.1"})
    notes = " ".join(compare(scanned(), run).notes)
    assert "the runs have different epsilons" in notes
    assert "the runs have different dormant rules" in notes


def test_layers_that_differ_in_their_heads_are_counted_in_all() -> None:
    run = scanned()
    run.heads = run.heads[~((run.heads["layer"] == 1) & (run.heads["head"] == 3))]
    assert describe_shape(run) == "3 layers, 11 heads in all"


@pytest.mark.slow
def test_a_metric_that_neither_run_nor_baseline_holds() -> None:
    policy = Policy.model_validate({"rules": [{"metric": "bos_mass", "level": "head", "max_change": 0.1}]})
    run = scanned()
    run.sequences = run.sequences.drop(columns="bos_mass")
    with pytest.raises(SinkscopeError, match="neither the run nor the baseline holds bos_mass at level head"):
        check(run, baseline_of(run), policy)


def without_a_level(data: dict[str, Any]) -> None:
    data["levels"] = [entry for entry in data["levels"] if entry["level"] != "layer"]


def without_a_place(data: dict[str, Any]) -> None:
    data["levels"][-1]["mean"] = {name: values[:-1] for name, values in data["levels"][-1]["mean"].items()}


@pytest.mark.parametrize(
    ("damage", "words"),
    [(without_a_level, "it has no level layer of"), (without_a_place, "does not have one value for each place")],
)
def test_a_baseline_that_lacks_a_part(damage: Any, words: str, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    file = tmp_path / "baseline.json"
    assert CliRunner().invoke(app, ["baseline", str(tmp_path / "run"), "-o", str(file)]).exit_code == 0
    data = json.loads(file.read_text("utf-8"))
    damage(data)
    file.write_text(json.dumps(data), "utf-8")
    with pytest.raises(SinkscopeError, match=rf"baseline .* is damaged: .*{words}"):
        read_baseline(file)
    with pytest.raises(SinkscopeError, match=r"cannot read the baseline .*: No such file or directory"):
        read_baseline(tmp_path / "none.json")


def test_where_tables_and_selections_cannot_go(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    run = str(tmp_path / "a")
    for words, said in (
        (["compare", run, run, "--csv", str(tmp_path)], f"cannot write {tmp_path}: it is a folder"),
        (["export", run, run, "--heads", "sink"], "--heads takes one run"),
    ):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr == f"sinkscope: error: {said}\n"
