"""Result folders: written whole or not at all, never over somebody's files, never over a finished result unasked."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    pass


WORK, UNFINISHED = ".sinkscope-", "shards"
"""Inside a result folder: what is being written (a prefix), and what an unfinished scan has measured."""


@dataclass(frozen=True)
class FolderKind:
    """What a folder of results may hold.

    Attributes:
        name: `run`, `ablation`.
        files: all names it may hold: what else is there is somebody's, and nothing is written beside it.
        finished: True for a finished result of ours, False for an interrupted one, None for neither.
    """

    name: str
    files: frozenset[str]
    finished: Callable[[Path], bool | None]

    def check(self, target: Path, force: bool, resume: bool = False) -> None:
        """Refuses a folder that a new result must not be put into; called before the long part and before writing.

        A scan that was killed leaves shards: `resume` goes on with them, `force` throws them away.
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
                f"{target} holds files that are not {_a(self.name)}'s ({foreign[0]}): give another --out"
            )
        state, unfinished = self.finished(target), UNFINISHED in names
        if unfinished and not (force or resume):
            raise SinkscopeError(f"{target} holds an unfinished scan: --resume goes on with it, --force starts anew")
        if state and not force and not unfinished:
            raise SinkscopeError(f"{target} holds a finished {self.name}: pass --force to replace it, or another --out")
        if names and not unfinished and state is None:
            raise SinkscopeError(
                f"{target} holds no {self.name} of sinkscope's, but files named like one's: give another --out"
            )
        _check_writable(target)

    def write(self, folder: str | Path, force: bool, fill: Callable[[Path], None], resume: bool = False) -> list[Path]:
        """Lets `fill` write into a temporary folder, then moves everything into place; the paths that are there then.

        Raises SinkscopeError as `check` does, and where the disk is full or not writable: the folder is as it was.
        """
        target = Path(folder).resolve()
        self.check(target, force, resume)
        made = [parent for parent in (target, *target.parents) if not parent.exists()]
        try:
            target.mkdir(parents=True, exist_ok=True)
            for left in target.glob(f"{WORK}*"):  # by a process that was killed while it wrote
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
        """New files in, old ones out; on an error the old ones come back."""
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


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _check_writable(target: Path) -> None:
    """Shows before the long part that results can be written: in the nearest folder that is there."""
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise SinkscopeError(f"cannot write to {target.parent}: {error.strerror}; give another --out") from None


def write_file(path: Path, content: str | bytes) -> None:
    """Writes to a temporary file beside the target, then renames it. Raises SinkscopeError where that cannot be."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise SinkscopeError(f"cannot write {path}: {error.strerror or error}") from None


def check_writable(path: Path | None) -> None:
    """Shows before the long part that a result can be written."""
    if path is None:
        return
    if path.is_dir():
        raise SinkscopeError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise SinkscopeError(f"cannot write {path}: no folder {path.parent}")
