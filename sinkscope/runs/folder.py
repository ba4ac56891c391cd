"""Writes result folders: whole or not at all, never over foreign files, over a finished result only with --force."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sinkscope.errors import SinkscopeError

WORK, UNFINISHED = ".sinkscope-", "shards"
"""Names inside a result folder: the prefix of a temporary folder, and the folder of an unfinished scan's shards."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of result folder.

    Attributes:
        name: `run` or `ablation`.
        files: names of all files that the folder may hold; a folder with any other file is never written to.
        finished: tells of a folder whether it holds a finished result (True), an interrupted one (False) or neither
            (None).
    """

    name: str
    files: frozenset[str]
    finished: Callable[[Path], bool | None]

    def check(self, target: Path, force: bool, resume: bool = False) -> None:
        """Raises SinkscopeError where a new result must not be put into `target`; called before measuring and writing.

        A scan that was killed leaves shards: `resume` continues from them, `force` discards them.
        """
        if not target.exists():
            _check_writable(target)
            return
        if not target.is_dir():
            raise SinkscopeError(f"{target} is a file: give another --out")
        names = [path.name for path in target.iterdir() if not path.name.startswith(WORK)]
        foreign = sorted(name for name in names if name not in self.files and name != UNFINISHED)
        if foreign:
            raise SinkscopeError(
                f"{target} holds files that are not {_with_article(self.name)}'s ({foreign[0]}): give another --out"
            )
        state, unfinished = self.finished(target), UNFINISHED in names
        if unfinished and not (force or resume):
            raise SinkscopeError(f"{target} holds an unfinished scan: --resume goes on with it, --force starts anew")
        if state and not force and not unfinished:
            raise SinkscopeError(f"{target} holds a finished {self.name}: pass --force to replace it, or another --out")
        if names and not unfinished and state is None:
            raise SinkscopeError(
                f"{target} holds files named like {_with_article(self.name)}'s, but no {self.name} of sinkscope's: "
                "give another --out"
            )
        _check_writable(target)

    def write(self, folder: str | Path, force: bool, fill: Callable[[Path], None], resume: bool = False) -> list[Path]:
        """Lets `fill` write into a temporary folder, moves its files into place, and returns the paths of all files.

        Raises SinkscopeError as `check` does, and where the disk is full or not writable; the folder is then unchanged.
        """
        target = Path(folder).resolve()
        self.check(target, force, resume)
        made = [parent for parent in (target, *target.parents) if not parent.exists()]
        try:
            target.mkdir(parents=True, exist_ok=True)
            for left in target.glob(f"{WORK}*"):  # left by a process that was killed while it wrote
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=WORK, dir=target) as work:
                fill(Path(work))
                self._move_in(Path(work), target)
        except OSError as error:
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise SinkscopeError(f"cannot write {folder}: {error.strerror or error}") from None
        return sorted(Path(folder) / path.name for path in target.iterdir() if path.name in self.files)

    def _move_in(self, work: Path, target: Path) -> None:
        """Replaces the old files by the new ones; on an error it moves the old ones back."""
        new = sorted(path.name for path in work.iterdir())
        old = work / "old"
        old.mkdir()
        moved: list[tuple[Path, Path]] = []
        try:
            for name in [path.name for path in target.iterdir() if path.name in self.files]:
                moved.append((target / name, old / name))
                (target / name).rename(old / name)
            for name in new:
                moved.append((work / name, target / name))
                (work / name).rename(target / name)
        except OSError:
            for source, place in reversed(moved):
                with contextlib.suppress(OSError):
                    place.rename(source)
            raise


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _check_writable(target: Path) -> None:
    """Tests, before anything is measured, that the nearest existing folder can be written to. Raises SinkscopeError."""
    nearest = next(path for path in (target, *target.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise SinkscopeError(f"cannot write to {target.parent}: {error.strerror}; give another --out") from None


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: to a temporary file beside it, then renamed over it. A link stays a link.

    A device, a pipe and a stream of this process (/dev/stdout) cannot be replaced: the content is written into them.
    Raises SinkscopeError where it cannot be written; BrokenPipeError where the reader of a pipe has gone.
    """
    data = content.encode() if isinstance(content, str) else content
    stream = _own_stream(path)
    try:
        if stream is not None:
            with os.fdopen(os.dup(stream), "wb") as file:
                file.write(data)
        elif _may_be_replaced(path):
            _replace(Path(os.path.realpath(path)), data)
        else:
            with path.open("wb") as file:
                file.write(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SinkscopeError(f"cannot write {path}: {error.strerror or error}") from None


def _may_be_replaced(path: Path) -> bool:
    """There is a regular file, or none yet. Raises OSError for links that lead to each other."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _own_stream(path: Path) -> int | None:
    """The number of the open file that /dev/stdout, /dev/fd/N and the like stand for; None for other paths."""
    streams = {os.path.realpath(folder) for folder in ("/dev/fd", "/proc/self/fd")}
    for _ in range(40):  # links that lead to each other end here
        if path.name.isdecimal() and os.path.realpath(path.parent) in streams:
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
