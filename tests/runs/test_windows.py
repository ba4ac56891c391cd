"""Folders where fcntl is missing and open files cannot be removed, as on Windows, whose ways stand-ins have here."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sinkscope.runs import whole
from sinkscope.runs import whole as locks
from sinkscope.runs.folder import FolderKind

fcntl = pytest.importorskip("fcntl", reason="Windows itself is no place for stand-ins")

KIND = FolderKind("run", frozenset({"a", "b"}), lambda folder: (folder / "a").exists() or None)
WITHOUT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
from pathlib import Path
from sinkscope.runs import whole
from sinkscope.runs.run import load_run
target = Path(sys.argv[2])
left = target / f".run{whole.WORK}left"
left.mkdir(parents=True)
whole.remove_leftovers(target / "run")
with whole.work_in(target, f".run{whole.WORK}") as work:
    print(work.run.is_dir(), left.exists())
print(sorted(path.name for path in target.iterdir()) == [left.name])
"""


def fill(text: str, *files: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in files:
            (folder / name).write_text(text)

    return write


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def open_in(folder: Path) -> bool:
    """Whether this process has a file of the folder open."""
    streams = [os.path.realpath(stream) for stream in Path("/proc/self/fd").iterdir()]
    return any(folder.resolve() in Path(stream).parents for stream in streams)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Windows' calls refuse, refused here, and its lock of one byte."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the open files of this process cannot be listed")
    rename, fsync, rmtree, load = Path.rename, os.fsync, shutil.rmtree, ctypes.CDLL

    def rename_to_a_free_place(path: Path, target: Path) -> Path:
        if Path(target).exists():
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        return rename(path, target)

    def fsync_what_may_be_written(handle: int) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fsync(handle)

    def remove_what_is_closed(folder: Path, ignore_errors: bool = False) -> None:
        if not open_in(folder):
            rmtree(folder, ignore_errors)
        elif not ignore_errors:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    def load_by_name(name: str | None, **options: Any) -> Any:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        return load(name, **options)

    def lock_a_byte(handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    monkeypatch.setattr(Path, "rename", rename_to_a_free_place)
    monkeypatch.setattr(os, "fsync", fsync_what_may_be_written)
    monkeypatch.setattr(shutil, "rmtree", remove_what_is_closed)
    monkeypatch.setattr(ctypes, "CDLL", load_by_name)
    monkeypatch.setattr(Path, "is_mount", unsupported)
    monkeypatch.setattr(whole, "WINDOWS", True)
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", SimpleNamespace(locking=lock_a_byte, LK_NBLCK=2))


def unsupported(path: Path) -> bool:
    """As Python 3.11 has it on Windows."""
    raise NotImplementedError("Path.is_mount() is unsupported on this system")


@pytest.mark.usefixtures("windows")
def test_a_folder_is_made_replaced_and_left_without_traces(tmp_path: Path) -> None:
    out = tmp_path / "results" / "run"
    KIND.write(out, False, fill("1", "a", "b"))
    assert held(out) == {"a": "1", "b": "1"}
    KIND.write(out, True, fill("2", "a"))
    assert held(out) == {"a": "2"}
    assert names(tmp_path / "results") == ["run"]
    (tmp_path / "empty").mkdir()
    KIND.write(tmp_path / "empty", False, fill("3", "a"))
    assert held(tmp_path / "empty") == {"a": "3"}
    assert names(tmp_path) == ["empty", "results"]


@pytest.mark.usefixtures("windows")
def test_leftovers_go_and_what_is_held_stays(tmp_path: Path) -> None:
    left = tmp_path / f".run{whole.WORK}left"
    (left / "run").mkdir(parents=True)
    with whole.work_in(tmp_path, f".run{whole.WORK}") as work:
        whole.remove_leftovers(tmp_path / "run")
        assert work.run.is_dir()
        assert not left.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["fcntl", "fcntl msvcrt"])
def test_a_system_without_locks_keeps_leftovers_and_writes(missing: str, tmp_path: Path) -> None:
    """Outside Windows msvcrt is missing too; there as on a file system without locks."""
    command = [sys.executable, "-c", WITHOUT, missing, str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]
