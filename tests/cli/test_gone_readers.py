"""A reader of stdout that goes away (`| head`) changes no exit code and ends no work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from desk import scanned
from tiers import slow_but

from sinkscope.cli import main

Ended = Callable[..., int | str | None]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Exit code of the `sinkscope` command whose stdout nobody reads, written at once as with PYTHONUNBUFFERED=1."""

    def run(*words: object, stream: str = "stdout") -> int | str | None:
        reader, writer = os.pipe()
        os.close(reader)
        with io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True) as gone:
            monkeypatch.setattr(sys, stream, gone)
            monkeypatch.setattr(sys, "argv", ["sinkscope", *map(str, words)])
            with pytest.raises(SystemExit) as end:
                main()
            os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
        return end.value.code

    return run


@pytest.mark.parametrize("stream", slow_but(["stdout", "stderr"], "stdout"))
@pytest.mark.parametrize("github", slow_but(["", "true"], "true"))
@pytest.mark.parametrize("options", [(), pytest.param(("--json",), marks=pytest.mark.slow)])
def test_a_failed_check_fails(
    options: tuple[str, ...], github: str, stream: str, ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed: exit code 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", github)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    for name, plant in (("a", ""), ("b", "zero head")):
        scanned(plant).save(name)
    assert ended("check", "b", "--baseline", "a", *options, stream=stream) == 1
    assert "sinkscope check: failed" in Path("summary.md").read_text("utf-8")


def test_all_models_are_scanned(
    ended: Ended, tiny_folder: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of the second model was left out, and one that failed was not told of."""
    monkeypatch.chdir(tmp_path)
    words = ("--seq-len", "16", "--num-sequences", "2", "--no-self-check", "--out", "runs")
    assert ended("scan", tiny_folder, "./none", copied, *words) == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == ["copied", "tiny"]
