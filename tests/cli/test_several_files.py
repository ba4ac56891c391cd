"""Commands that write more than one file write all of them or none."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkscope.cli import app

RUN = Path(__file__).parents[1] / "fixtures" / "v0_1" / "smoothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["card", "RUN", "--out", "card.md", "--badge", "badge.svg"],
        ["atlas", "RUN", "--out", "atlas.html", "--csv", "atlas.csv"],
        ["check", "RUN", "--baseline", "RUN", "--html", "check.html", "--junit", "check.xml"],
        ["trigger", "relaxed", "--groups", "1", "--rank", "1", "--width", "16", "--seeds", "1", "--out", "relaxed"],
        ["figures", "lampert", "RUN", "--out", "figures", "--no-maps", "--format", "svg"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_full_disk_leaves_none_of_several_files(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file finds no room: the first one is not there either, and files of before stay as they were."""
    monkeypatch.chdir(tmp_path)
    words = [str(RUN) if word == "RUN" else word for word in command]
    sync, calls = os.fsync, list[int]()

    def full(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # folders are synchronised too
            calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as inner:
        inner.setattr("os.fsync", full)
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "sinkscope: wrote" not in done.stderr
    assert done.stderr.endswith("No space left on device\n")
    made = [tmp_path / "relaxed"] if command[0] == "trigger" else []  # a folder that is tried before a long search
    assert list(tmp_path.rglob("*")) == made
    assert CliRunner().invoke(app, words).exit_code == 0
    files = {path: path.write_text("before", encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) > 1
    calls.clear()
    with monkeypatch.context() as inner:
        inner.setattr("os.fsync", full)
        assert CliRunner().invoke(app, words).exit_code == 2
    assert {path: path.read_text("utf-8") for path in files} == dict.fromkeys(files, "before")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*files}
