"""What stays of a training, and what the screen says, where Ctrl-C ends it or the disk is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.trigger import training
from sinkscope.trigger.model import TriggerModel

SMALL = ("--length", "5", "--dim", "5", "--steps", "3")


def call(*words: object) -> tuple[int, str]:
    """The exit code and stderr of `sinkscope trigger`."""
    done = CliRunner().invoke(app, ["trigger", *map(str, words)])
    return done.exit_code, done.stderr


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a training takes this step."""
    advance = training.Training.advance

    def advanced(self: training.Training) -> None:
        advance(self)
        if self.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "advance", advanced)


def test_an_interrupted_training_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        code, told = call("train", *SMALL, "--out", out, "--quiet")
    assert (code, told) == (130, f"sinkscope: interrupted: the training is kept in {out}; --resume goes on\n")
    assert call("train", *SMALL, "--out", out, "--quiet", "--resume") == (0, "")


def test_an_interrupt_before_the_training_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "__init__", interrupted)
    assert call("train", *SMALL, "--out", tmp_path / "out") == (130, "sinkscope: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("study", "--default", "zero", "--attention", "relu"),
        ("necessity", "--group", "anchor"),
        ("reproduce", "--size", "1"),
    ],
    ids=lambda words: words[0],
)
def test_an_interrupted_study_says_how_it_goes_on(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(1, monkeypatch)
    code, told = call(*words, "--seeds", 1, "--out", tmp_path, "--quiet")
    assert (code, told) == (
        130, f"sinkscope: interrupted: what is trained is kept in {tmp_path}; the same command goes on\n"
    )  # fmt: skip


def full_disk(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def save_half(self: TriggerModel, folder: Path) -> None:
    """Stands in for `save_pretrained`: the disk takes config.json and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    full_disk()


@pytest.mark.parametrize(
    "words",
    [("explicit", "OUT"), ("train", "--out", "OUT", *SMALL), ("train", "--out", "OUT", *SMALL, "--checkpoints", "2")],
    ids=["explicit", "train", "checkpoints"],
)
def test_a_full_disk_leaves_nothing(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "out"
    monkeypatch.setattr(TriggerModel, "save_pretrained", save_half)
    monkeypatch.setattr(training, "save_file", full_disk)
    code, told = call(*(out if word == "OUT" else word for word in words))
    assert code == 2
    assert told.splitlines()[-1] == f"sinkscope: error: cannot write {out}: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_end_keeps_the_state_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("train", *SMALL, "--out", tmp_path, "--quiet", "--resume")
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        assert call(*words)[0] == 130
    with monkeypatch.context() as patch:
        patch.setattr(TriggerModel, "save_pretrained", save_half)
        assert call(*words)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == [training.STATE]
    assert call(*words) == (0, "")
