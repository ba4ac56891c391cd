"""Files and folders that results are written to."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest

from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import check_place, save_parquet, write_file

WRITE = "from pathlib import Path; from sinkscope.runs.folder import write_file; "


def test_a_file_is_replaced_and_a_link_to_it_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.write_text("old, and longer than the new")
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_file_is_written_beside_its_place_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the old file open reads it to its end, and a disk that is full leaves it."""
    path, same = tmp_path / "file", tmp_path / "second name"
    path.write_text("old, and longer than the new")
    os.link(path, same)
    write_file(path, "new")
    assert (path.read_text(), same.read_text()) == ("new", "old, and longer than the new")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SinkscopeError, match=r"^cannot write .*file: No space left on device$"):
        write_file(path, "newest")
    assert path.read_text() == "new"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "second name"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    """A device node is no regular file either: /dev/null must not become one."""
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_file(pipe, b"content")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(10)
    assert read == [b"content"]


@pytest.mark.skipif(not Path("/dev/stdout").is_symlink(), reason="needs /dev/stdout")
def test_stdout_is_written_into(tmp_path: Path) -> None:
    """Into a pipe, and behind what a file that the shell appends to already holds. A link like /dev/stdout, for which
    a defect does no harm."""
    link = tmp_path / "stdout"
    link.symlink_to(Path("/dev/stdout").readlink())
    command = [sys.executable, "-c", f"{WRITE}write_file(Path({str(link)!r}), 'content')"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"content"
    path = tmp_path / "log"
    path.write_text("before ")
    with path.open("ab") as log:
        subprocess.run(command, stdout=log, check=True)
    assert path.read_text() == "before content"


def test_links_that_lead_to_each_other_are_one_line(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.symlink_to(b)
    b.symlink_to(a)
    with pytest.raises(SinkscopeError, match=r"^cannot write .*[/\\]a: "):
        write_file(a, "content")
    assert a.is_symlink()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_a_pipe_whose_reader_has_gone_is_told_apart_from_a_full_disk(tmp_path: Path) -> None:
    """The command line ends quietly then, as `sinkscope card RUN | head` should."""
    reader, writer = os.pipe()
    os.close(reader)
    (tmp_path / "stdout").symlink_to(f"/dev/fd/{writer}")
    try:
        with pytest.raises(BrokenPipeError):
            write_file(tmp_path / "stdout", "content")
    finally:
        os.close(writer)


@pytest.mark.parametrize("name", [".", "new", "new/deeper"])
def test_the_folder_that_cannot_be_written_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may well be written to, and a folder below it is not there."""

    def refused(dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(SinkscopeError) as told:
        check_place(tmp_path / name)
    assert str(told.value) == f"cannot write to {tmp_path}: Permission denied; give another --out"


def test_a_full_disk_is_told_without_pyarrow_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "Error writing bytes to file. Detail: [errno 28] No space left on device"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, told)

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_parquet(pd.DataFrame(), tmp_path / "heads.parquet")
    assert caught.value.strerror == os.strerror(errno.ENOSPC)
