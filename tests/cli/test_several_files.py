"""Commands that write more than one file write all of them or none."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import write_files

RUN = Path(__file__).parents[1] / "fixtures" / "v0_1" / "smoothing"


@pytest.mark.parametrize(
    "command",
    [
        ["card", "RUN", "--out", "x", "--badge", "./x"],
        ["atlas", "RUN", "--out", "x", "--csv", "link"],
        ["check", "RUN", "--baseline", "RUN", "--html", "x", "--junit", "x"],
    ],
    ids=lambda words: words[0],
)
def test_two_outputs_in_one_file_are_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both one was written, and both were told of."""
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("x")
    done = CliRunner().invoke(app, [str(RUN) if word == "RUN" else word for word in command])
    assert done.exit_code == 2
    said = f"cannot write {Path(command[-1])}: two outputs would stand there; give each a file of its own"
    assert done.stderr == f"sinkscope: error: {said}\n"
    assert not Path("x").exists()


@pytest.mark.parametrize(
    "command",
    [["baseline", "run", "--out"], ["atlas", "run", "--csv"], ["card", "run", "--out"], ["export", "run", "--out"]],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("name", ["run/heads.csv", "run/manifest.json", "link"])
def test_a_file_of_a_run_is_not_replaced(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was damaged from then on."""
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(RUN, "run"))
    Path("link").symlink_to(run / "heads.csv")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    done = CliRunner().invoke(app, [*command, name])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"sinkscope: error: cannot write {name}: it is a file of a run; give another\n"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_two_outputs_may_go_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["atlas", str(RUN), "--out", os.devnull, "--csv", os.devnull]
    assert CliRunner().invoke(app, words).exit_code == 0


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
    assert list(tmp_path.rglob("*")) == []
    assert CliRunner().invoke(app, words).exit_code == 0
    files = {path: path.write_text("before", encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) > 1
    calls.clear()
    with monkeypatch.context() as inner:
        inner.setattr("os.fsync", full)
        assert CliRunner().invoke(app, words).exit_code == 2
    assert {path: path.read_text("utf-8") for path in files} == dict.fromkeys(files, "before")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*files}


@pytest.mark.parametrize("links", [True, False], ids=["links", "a file system without links"])
def test_a_file_that_cannot_be_replaced_leaves_the_others_as_they_were(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's file in /tmp: a new one can be written beside it, and not be renamed over it."""
    old, new, theirs = tmp_path / "old", tmp_path / "new", tmp_path / "theirs"
    old.write_text("before")
    theirs.write_text("before")
    rename = Path.replace

    def guarded(path: Path, target: Path) -> Path:
        if target == theirs:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return rename(path, target)

    def without_links(path: Path, target: Path) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with monkeypatch.context() as inner:
        inner.setattr(Path, "replace", guarded)
        if not links:
            inner.setattr(Path, "hardlink_to", without_links)
        with pytest.raises(SinkscopeError, match=r"theirs: Operation not permitted$"):
            write_files({old: "after", new: "after", theirs: "after"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "before", "theirs": "before"}
    write_files({old: "after", new: "after", theirs: "after"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ["old", "new", "theirs"], "after"
    )
