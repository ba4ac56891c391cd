"""Puts a folder into its place whole: the steps that `FolderKind.write` is made of, each safe against a kill.

Names that begin with `WORK` inside a result folder, and `.NAME` + `WORK` beside one, are ours."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import Any

WORK = ".sinkscope-"
COMMITTED, JOURNAL, LOCK = f"{WORK}committed", "journal.json", "lock"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux' constants for renameat2."""

CANNOT = frozenset(
    {
        errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBUSY, errno.EXDEV, errno.EPERM,
        errno.EACCES, errno.EROFS,
    }
)  # fmt: skip
"""Errors by which a system says that it cannot move a folder in one step: no such call, a mount point, no right."""

ATTEMPTS = 20
"""Temporary folders that are made where other processes remove each before it is locked."""

WINDOWS = os.name == "nt"
"""There a file that is open can neither be removed nor be synced by who may only read it, and no folder be renamed to
the place of an empty one."""


def open_file(path: Path) -> BufferedReader:
    """Opens a file to be read. Raises OSError; also where something else stands there, such as a pipe without a writer,
    which would be waited for for ever."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError as `open_file` does."""
    with open_file(path) as file:
        return file.read()


@dataclass(frozen=True)
class Work:
    """A temporary folder that a living process holds by a lock. `run`: the folder in it that is to be filled."""

    folder: Path
    lock: int

    @property
    def run(self) -> Path:
        """The folder that is to be filled."""
        return self.folder / "run"


@contextmanager
def work_in(parent: Path, prefix: str) -> Iterator[Work]:
    """Makes a temporary folder in `parent` and removes it at the end, with what is then in it. Raises OSError."""
    folder, lock = _new_folder(parent, prefix)
    try:
        work = Work(folder, lock)
        work.run.mkdir()  # mkdtemp lets nobody else in; this folder follows the umask
        yield work
    finally:
        if WINDOWS:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        if not WINDOWS:
            os.close(lock)


def _new_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and its lock. Another process that removes leftovers may take it for one before it is locked: then
    another is made. Raises OSError."""
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = locked(folder)
        except FileNotFoundError:
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None and folder.is_dir():  # else its lock file was removed before it was locked
            return folder, lock
        if lock is not None:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
    raise FileNotFoundError(errno.ENOENT, "another process removes each new folder", str(parent))


def locked(folder: Path) -> int | None:
    """Opens and locks the folder's lock file; None where another process holds it. The system frees it at a kill.

    Where a file system has no locks, every folder counts as held: it is left to the user.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take(lock)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        pass
    return lock


def is_open_file(path: Path, handle: int) -> bool:
    """Whether an open file still stands under this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_locked(folder: Path) -> bool:
    """Whether another process holds the folder's lock file."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        take(lock)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(lock)
    return False


def remove_leftovers(target: Path) -> None:
    """Removes the temporary folders for `target` whose process was killed. Keeps those of living processes."""
    for parent, prefix in ((target.parent, f".{target.name}{WORK}"), (target, WORK)):
        with suppress(OSError):
            for left in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
                if left.name != COMMITTED and left.is_dir():
                    _remove_if_free(left)


def _remove_if_free(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            take(lock)
            if not WINDOWS:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
        if WINDOWS:
            shutil.rmtree(folder, ignore_errors=True)


def may_be_replaced(target: Path) -> bool:
    """Whether another folder may take the place of `target`: it is no mount point, and not where the user works.

    A shell or process whose working folder was exchanged would stand in a folder that is deleted.
    """
    if not target.exists():
        return True
    with suppress(OSError):
        here = Path.cwd()
        return not os.path.ismount(target) and here != target and target not in here.parents
    return False


def like(new: Path, old: Path) -> bool:
    """Gives `new` the mode of `old`; False where their owners differ, which only the superuser could change."""
    if not old.exists():
        return True
    was, now = old.stat(), new.stat()
    if (was.st_uid, was.st_gid) != (now.st_uid, now.st_gid):
        return False
    new.chmod(stat.S_IMODE(was.st_mode))
    return True


def put(new: Path, target: Path) -> bool:
    """Moves the folder `new` to `target` in one step; a folder with files that is there takes the place of `new`.

    Returns False, with nothing moved, where the system cannot do that. Raises OSError for all else.
    """
    try:
        if target.exists() and any(target.iterdir()):
            exchange(new, target)
        else:
            if WINDOWS and target.exists():
                target.rmdir()
            new.rename(target)  # it may replace an empty folder
    except OSError as error:
        if error.errno in CANNOT:
            return False
        raise
    sync_folder(target.parent)
    return True


def exchange(one: Path, other: Path) -> None:
    """Exchanges two folders in one step, by Linux' renameat2. Raises OSError, ENOSYS where the system has no such."""
    call = None if WINDOWS else getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    paths = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    here, flags = ctypes.c_int(AT_FDCWD), ctypes.c_uint(RENAME_EXCHANGE)
    if call(here, paths[0], here, paths[1], flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def commit(new: Path, target: Path, kept: Collection[str]) -> None:
    """Decides that the files of the folder `new`, which lies inside `target`, are those of `target`.

    The decision is one rename; `settle` then carries it out. `kept`: further names in `target` that stay.
    """
    names = sorted(path.name for path in new.iterdir())
    (new / JOURNAL).write_text(json.dumps({"files": names, "kept": sorted(kept)}), encoding="utf-8")
    sync_tree(new)
    new.rename(target / COMMITTED)
    sync_folder(target)


def settle(target: Path, ours: Collection[str]) -> None:
    """Moves the files of a committed write into place, also those of a process that was killed meanwhile.

    It may be called again after any of its steps. `ours`: names that are removed where the write did not keep them.
    Raises OSError, and ValueError or KeyError for a damaged journal.
    """
    committed = target / COMMITTED
    try:
        if not committed.is_dir():
            return
    except OSError:  # a folder that may not be read: whoever reads it says so
        return
    with suppress(FileNotFoundError):  # without a journal all has been moved
        journal = json.loads(read_file(committed / JOURNAL))
        for name in sorted({*ours} - {*journal["files"], *journal["kept"]}):
            remove(target / name)
        for name in journal["files"]:
            with suppress(FileNotFoundError):
                (committed / name).replace(target / name)
        sync_folder(target)
        (committed / JOURNAL).unlink()
    with suppress(FileNotFoundError):
        committed.rmdir()
    sync_folder(target)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_files(source: Path, target: Path) -> None:
    """Gives `target`, a new folder, the files of `source`: by a second name, or as copies where there are no links."""
    target.mkdir()
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)


def sync_tree(folder: Path) -> None:
    """Waits until the disk holds a folder and all files in it. Raises OSError."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            sync_tree(path)
        else:
            sync_file(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Waits until the disk holds the content of a file. Raises OSError."""
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Waits until the disk holds the names in a folder. Some file systems cannot sync a folder: that is no error."""
    with suppress(OSError):
        sync_file(folder)


# Locks a file for one process; the system frees it when the file is closed or the process dies.


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")
"""What locks files: the first on POSIX, the second on Windows."""


def take(lock: int) -> None:
    """Locks an open file. Raises BlockingIOError where another process holds it, OSError where there are no locks."""
    if fcntl is not None:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        try:
            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)  # its first byte, which need not be there
        except PermissionError as error:
            raise BlockingIOError(errno.EAGAIN, error.strerror) from None
    else:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
