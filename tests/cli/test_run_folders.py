"""Where a run goes without --out: beside what is there; --resume finds the unfinished scan of the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SHORT
from typer.testing import CliRunner

from sinkscope.checkpoints.sources import check_model
from sinkscope.cli import app
from sinkscope.cli.scan_job import free_folder, run_folder
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import KEY, UNFINISHED, taken
from sinkscope.runs.request import make_request
from sinkscope.runs.run import check_target, load_run
from sinkscope.runs.whole import LOCK, is_locked, locked

ASKED = {"seed": 0, "data": ["prose"]}


def left(folder: Path, asked: dict[str, Any], finished: bool = False) -> Path:
    """A folder as a scan of these settings leaves it."""
    inner = folder if finished else folder / UNFINISHED
    inner.mkdir(parents=True, exist_ok=True)
    request = {**asked, "more": 1} if finished else asked
    (inner / ("manifest.json" if finished else KEY)).write_text(json.dumps({"request": request}))
    return folder


def test_a_folder_that_is_there_gets_a_number(tmp_path: Path) -> None:
    base = tmp_path / "run"
    assert free_folder(base) == base
    base.mkdir()
    assert free_folder(base) == base, "an empty folder is free"
    left(base, ASKED, finished=True)
    assert free_folder(base) == tmp_path / "run-2"
    left(tmp_path / "run-2", ASKED)
    assert run_folder(base, ASKED, resume=False, force=False) == tmp_path / "run-3"
    assert run_folder(base, ASKED, resume=False, force=True) == base


def test_resume_takes_the_unfinished_scan_of_the_same_settings(tmp_path: Path) -> None:
    base, other = tmp_path / "run", {**ASKED, "seed": 1}
    assert run_folder(base, ASKED, resume=True, force=False) == base, "nothing there: a new scan"
    left(base, other)
    assert run_folder(base, ASKED, resume=True, force=False) == base, "the scan says what differs"
    left(tmp_path / "run-2", ASKED)
    left(tmp_path / "run-3", other)
    assert run_folder(base, ASKED, resume=True, force=False) == tmp_path / "run-2"
    assert run_folder(base, other, resume=True, force=False) == tmp_path / "run-3"


def test_resume_finds_the_finished_scan_of_the_same_settings(tmp_path: Path) -> None:
    base = left(tmp_path / "run", ASKED, finished=True)
    left(tmp_path / "run-2", {**ASKED, "seed": 1}, finished=True)
    assert run_folder(base, ASKED, resume=True, force=False) == base
    assert run_folder(base, {**ASKED, "seed": 2}, resume=True, force=False) == tmp_path / "run-3"


def test_a_resumed_scan_of_other_text_is_refused_before_the_model_is_loaded(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.engine.scan.scan_request", lambda *_, **__: pytest.fail("the model was loaded"))
    asked = make_request(model=str(tiny_folder), seq_len=64).part("text", "columns", "rounding")
    folder = left(tmp_path / "run", asked)
    words = ["scan", str(tiny_folder), "--seq-len", "32", "--resume", "--out", str(folder)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "unfinished scan with another --seq-len (64 there, 32 now); give another --out, or --force" in refused.stderr


def test_a_name_that_is_nearly_a_folder_s_is_not_looked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sinkscope.checkpoints.sources.find_source", lambda *_: pytest.fail("the hub was asked"))
    for name in ("smol", "bad-wv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    refused = CliRunner().invoke(app, ["scan", "bad-wvv"])
    assert refused.exit_code == 2
    assert "no folder 'bad-wvv'; did you mean bad-wv? A model of the hub is named with its owner" in refused.stderr
    (tmp_path / "runs" / "gemma").mkdir(parents=True)
    (tmp_path / "runs" / "gemma" / "manifest.json").write_text("{}")
    refused = CliRunner().invoke(app, ["scan", "runs/gemmma"])
    assert refused.exit_code == 2
    assert "no folder 'runs/gemmma'; did you mean runs/gemma?" in refused.stderr


def test_a_folder_that_holds_no_model_is_not_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone, `nope` is near to the folder `sinkscope`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sinkscope").mkdir()
    refused = CliRunner().invoke(app, ["claims", "nope"])
    assert refused.exit_code == 2
    assert "sinkscope?" not in refused.stderr


def test_a_model_of_the_hub_beside_a_folder_of_its_owner_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr("sinkscope.checkpoints.sources.find_source", lambda *words: asked.append(words[0]))
    (tmp_path / "google" / "gemma-3-1b").mkdir(parents=True)
    check_model("google/gemma-3-1b-pt")
    assert asked == ["google/gemma-3-1b-pt"]


def test_a_damaged_key_is_no_match(tmp_path: Path) -> None:
    base = left(tmp_path / "run", ASKED)
    (base / UNFINISHED / KEY).write_text("{")
    left(tmp_path / "run-2", ASKED)
    assert run_folder(base, ASKED, resume=True, force=False) == tmp_path / "run-2"


def test_a_folder_that_another_scan_has_taken_gets_a_number(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "tiny"
    with taken(base):
        assert free_folder(base) == base.with_name("tiny-2")
        with pytest.raises(SinkscopeError, match=r"another process measures into .*tiny just now"):
            check_target(base, force=False)
    assert not base.parent.exists(), "nothing came into it"
    (base / UNFINISHED).mkdir(parents=True)
    (base / UNFINISHED / LOCK).touch()
    assert free_folder(base) == base, "its process was killed before it measured anything"
    check_target(base, force=False)


def failing(folder: Path, found: list[bool]) -> Callable[..., None]:
    """Stands in for a measurement: notes whether its folder is taken, and cannot load its model."""

    def loads(*_: Any, **__: Any) -> None:
        found.append(is_locked(folder / UNFINISHED))
        raise SinkscopeError("the model cannot be loaded")

    return loads


def test_a_scan_takes_its_folder_before_it_loads_anything(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[bool] = []
    loads = failing(tmp_path / "runs" / "tiny", found)
    monkeypatch.setattr("sinkscope.engine.scan.scan_request", loads)
    first = CliRunner().invoke(app, ["scan", str(tiny_folder), *SHORT])
    assert (first.exit_code, found) == (2, [True])
    assert not (tmp_path / "runs").exists()
    (tmp_path / "out" / UNFINISHED).mkdir(parents=True)
    lock = locked(tmp_path / "out" / UNFINISHED)
    second = CliRunner().invoke(app, ["scan", str(tiny_folder), *SHORT, "--out", "out"])
    assert (second.exit_code, len(found)) == (2, 1)
    assert "another process measures into out just now" in second.stderr
    assert lock is not None
    os.close(lock)


def test_interventions_take_their_folder_before_they_load_anything(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[bool] = []
    loads = failing(tmp_path / "runs" / "tiny-evict", found)
    monkeypatch.setattr("sinkscope.experiments.arms.experiment.arms", loads)
    monkeypatch.setattr("sinkscope.cli.arms_job.ArmsJob._foretell", lambda *_, **__: None)
    ended = CliRunner().invoke(app, ["evict", str(tiny_folder), *SHORT])
    assert (ended.exit_code, found) == (2, [True]), ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_same_scan_twice_and_resumed(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def scan(*more: str) -> Any:
        result = CliRunner().invoke(app, ["scan", str(tiny_folder), *SHORT, *more])
        assert result.exit_code == 0, result.output
        return result

    assert "next: sinkscope report runs/tiny -o tiny.html" in scan().stdout
    assert "runs/tiny is there already: this run goes to runs/tiny-2" in scan("--seed", "1").stderr
    assert f"{tiny_folder}: already finished, in runs/tiny\n" in scan("--resume").stderr
    assert "already finished, in runs/tiny-2" in scan("--resume", "--seed", "1").stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


@pytest.mark.slow
def test_a_scan_has_a_display_name(tmp_path: Path, tiny_folder: Path) -> None:
    """The name is in every table and page, and a scan of another name is the same scan."""
    words = ["scan", str(tiny_folder), "--seq-len", "16", "--num-sequences", "2", "--no-self-check"]
    words += ["--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*words, "--name", "SmolLM2"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("SmolLM2  ")
    run = load_run(tmp_path / "run")
    assert (run.manifest.model.shown, run.manifest.request.name) == ("SmolLM2", "SmolLM2")
    assert run.manifest.model.id == str(tiny_folder)
    again = CliRunner().invoke(app, [*words, "--resume"])
    assert "already finished" in again.stderr
    several = CliRunner().invoke(app, ["scan", str(tiny_folder), "other", "--name", "x"])
    assert several.exit_code == 2
    assert "--name 'x' is what one model is called, and 2 are to be scanned" in several.stderr
