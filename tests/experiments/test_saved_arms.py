"""Folders of arms read back: intervals, the run they belong to, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from arm_folders import LOSSES, SEQUENCES, losses, write_arms
from desk import scanned
from scipy.stats import sem, ttest_1samp

from sinkscope.errors import SinkscopeError
from sinkscope.runs.saved.arms import load_arms, placed
from sinkscope.runs.saved.arms_table import BESIDE, MEASURES, ArmNumbers, table_of


@pytest.mark.parametrize("kind", ["arms", "ablation"])
def test_the_interval_is_that_of_the_paired_test(tmp_path: Path, kind: str) -> None:
    table = load_arms(write_arms(tmp_path / "a", scanned(), kind=kind)).table.set_index("arm")
    for name, own in losses().items():
        row = table.loc[name]
        if name == "unablated":
            assert (row["increase_low"], row["increase_high"]) == (0, 0)
            continue
        expected = ttest_1samp(own.mean(0) - LOSSES, 0).confidence_interval(0.95)
        assert (row["increase_low"], row["increase_high"]) == pytest.approx(tuple(expected), rel=1e-6), name


def test_what_stands_beside_the_loss_is_a_mean_over_draws_with_its_error_over_sequences() -> None:
    noise = np.random.default_rng(2)
    draws = (("unablated", None), ("keys:random1", 0), ("keys:random1", 1))
    measured = [
        ArmNumbers(name, None, None, draw, {measure: noise.random(SEQUENCES) for measure in MEASURES})
        for name, draw in draws
    ]
    table, _ = table_of(measured, {})
    for measure in BESIDE:
        for name, own in (("unablated", measured[:1]), ("keys:random1", measured[1:])):
            each = np.mean([numbers.values[measure] for numbers in own], 0)
            row = table.set_index("arm").loc[name]
            assert row[measure] == pytest.approx(each.mean())
            assert row[f"{measure}_sem"] == pytest.approx(sem(each))


def test_an_interval_of_fewer_sequences_than_were_read_is_missing(tmp_path: Path) -> None:
    """The saved table does not say how many: an interval of all would be too narrow."""
    table = load_arms(write_arms(tmp_path / "a", scanned(), missing=2)).table
    assert np.isfinite(table["increase"]).all()
    assert table["increase_low"].isna().tolist() == [False, True, True, True, True]


def test_arms_stand_with_the_run_that_they_were_given(tmp_path: Path) -> None:
    one, other, half = scanned(), scanned(text=1), scanned(dtype="bfloat16")
    arms = load_arms(write_arms(tmp_path / "a", other))
    assert placed([arms], [one, other]) == [[], [arms]]
    assert placed([arms], [half, one]) == [[], [arms]], "of the same dtype, where the run is not there"
    assert placed([], [one]) == [[]]


def test_arms_of_another_model_are_refused(tmp_path: Path) -> None:
    run = scanned()
    for place, facts in enumerate(({"id": "other"}, {"parameters": 1}, {"quantization": "gptq"})):
        arms = load_arms(write_arms(tmp_path / f"{place}", run, **facts))
        with pytest.raises(SinkscopeError, match="no run is of that model"):
            placed([arms], [run])
    run.manifest.model.weights_sha256 = "a"
    moved = load_arms(write_arms(tmp_path / "moved", run, id="elsewhere"))
    assert placed([moved], [run]) == [[moved]], "the same weights in another folder"
    arms = load_arms(write_arms(tmp_path / "weights", run, weights_sha256="b"))
    with pytest.raises(SinkscopeError, match="no run is of that model"):
        placed([arms], [run])


def test_what_is_no_folder_of_arms_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_arms(tmp_path / "whole", scanned())

    def broken(name: str, file: str, text: str | None) -> Path:
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        if text is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(text)
        return folder

    facts = json.loads((whole / "arms.json").read_text())

    def signed(name: str, text: str) -> Path:
        """Another table, with the SHA-256 that belongs to it."""
        folder = broken(name, "arms.csv", text)
        hashes = facts["files"] | {"arms.csv": hashlib.sha256(text.encode()).hexdigest()}
        (folder / "arms.json").write_text(json.dumps(facts | {"files": hashes}))
        return folder

    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "nowhere": "no such folder of arms",
        tmp_path / "empty": "holds no arms",
        broken("changed", "arms.csv", "arm,loss\nx,1\n"): "arms.csv was changed",
        broken("gone", "arms.csv", None): "are damaged",
        broken("json", "arms.json", "{"): "are damaged",
        broken("list", "arms.json", "[]"): "is damaged",
        signed("columns", "arm,loss\nunablated,1\n"): "no rows or other columns than this sinkscope's",
        signed("rows", (whole / "arms.csv").read_text().splitlines()[0] + "\n"): "no rows or other columns",
        broken("newer", "arms.json", json.dumps(facts | {"schema_version": 2})): "schema_version",
    }
    for folder, words in cases.items():
        with pytest.raises(SinkscopeError, match=words) as caught:
            load_arms(folder)
        assert len(str(caught.value).splitlines()) == 1
