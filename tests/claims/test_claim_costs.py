"""`sinkscope claims --dry-run`: what it tells is what would be measured, and nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from desk import scanned
from typer.testing import CliRunner

from sinkscope.claims.claim import NotTested, chosen_claims
from sinkscope.claims.findings import costs, put
from sinkscope.claims.subject import Subject
from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.runs.run import Run
from sinkscope.trigger.explicit import write_explicit

READING = {"data": "random", "seq_len": 32, "num_sequences": 8}


def claims(*words: object) -> Any:
    return CliRunner().invoke(app, ["claims", *map(str, words), "--dry-run", "--machine", "a100"])


@pytest.mark.parametrize(
    "chosen",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in [(), ("first-token",)]), ("value-is-not-needed",)],
)
def test_every_measurement_is_told_once_with_its_sequences(
    chosen: tuple[str, ...], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All claims, and one alone, against what `put` asks of the model."""
    measured: dict[str, int] = {}

    def scan(self: Subject, name: str, must: bool, settings: dict[str, Any]) -> Run:
        measured[name] = settings["num_sequences"]
        if name != "text":
            raise NotTested("not in this test")
        return scanned()  # by which a claim tells whether the model is one that it is about

    def arms(self: Subject) -> None:
        measured["arms"] = self.arms_settings()["num_sequences"]
        raise NotTested("not in this test")

    monkeypatch.setattr(Subject, "_scanned", scan)
    monkeypatch.setattr(Subject, "_arms", arms)
    every = chosen_claims(chosen)
    put(every, [Subject("tiny", str(tiny_folder), reading=READING, loading={"device": "cpu"})])
    subject = Subject("tiny", str(tiny_folder), reading=READING | {"data": "prose"}, loading={"device": "cpu"})
    told = costs(every, subject, "a100")
    assert [each.command for each in told.forecasts] == [f"claims ({name})" for name in measured]
    assert not told.notes
    for forecast, (name, count) in zip(told.forecasts, measured.items(), strict=True):
        texts = {"openings": 4, "controls": 2}.get(name, 1)
        read = {each.what: each.sequences for each in forecast.passes}
        assert read["arms" if name == "arms" else "scan"] == count * (7 if name == "arms" else texts), name


def test_the_command_measures_and_writes_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no line is broken in the midst of a long path
    write_explicit(tmp_path / "task", "softmax")
    scanned().save(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    shown = claims(tiny_folder, "task", "run", "--seq-len", 32, "--num-sequences", 8, "--out", "out")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert sorted(tmp_path.rglob("*")) == before
    assert max(map(len, shown.stdout.splitlines())) <= 80
    text = " ".join(shown.stdout.split())
    assert text.count("Dry run of claims (") == 5
    assert "5 measurements in all, " in text
    assert "claims on openings would not be tested: " in text
    assert "run is a saved run: nothing is measured" in text


def test_a_run_alone_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scanned().save(tmp_path / "run")
    assert claims("run").stdout == "Nothing would be measured.\nnote: run is a saved run: nothing is measured\n"


def test_what_an_earlier_call_kept_is_not_counted(tiny_folder: Path, tmp_path: Path, scan_cli: Any) -> None:
    kept: Outcome = scan_cli(
        tiny_folder, "--data", "random", "--seq-len", 16, "--num-sequences", 2, out=tmp_path / "text"
    )
    assert kept.code == 0
    subject = Subject("tiny", str(tiny_folder), reading=READING, loading={"device": "cpu"}, folder=tmp_path)
    told = costs(chosen_claims(("first-token",)), subject, "a100")
    assert [each.command for each in told.forecasts] == ["claims (controls)"]
    assert told.notes == [f"text is read from {tmp_path}, if weights, text and settings are still the same"]


def test_what_cannot_be_scanned_at_all_is_refused(tiny_folder: Path) -> None:
    subject = Subject("tiny", str(tiny_folder), reading=READING | {"seq_len": 10**6}, loading={"device": "cpu"})
    with pytest.raises(SinkscopeError, match="--seq-len 1000000 exceeds"):
        costs(chosen_claims(()), subject, "a100")
    alone = CliRunner().invoke(app, ["claims", str(tiny_folder), "--machine", "h100"])
    assert (alone.exit_code, "--machine goes with --dry-run" in alone.stderr) == (2, True)
