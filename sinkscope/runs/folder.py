"""Writes result folders: whole or not at all, never over foreign files, over a finished result only with --force."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError, first_line, is_text
from sinkscope.runs import whole
from sinkscope.runs.whole import WORK

if TYPE_CHECKING:
    import pandas as pd


UNFINISHED = "shards"
"""The folder of an unfinished scan's shards, inside a result folder."""

KEY = "key.json"
"""The file beside the shards that says which scan they belong to."""


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
        self.settle(target)
        if not target.exists():
            check_place(target)
            return
        if not target.is_dir():
            raise SinkscopeError(f"{target} is a file: give another --out")
        names = [path.name for path in target.iterdir() if not path.name.startswith(WORK)]
        foreign = sorted(name for name in names if name not in self.files and name != UNFINISHED)
        if foreign:
            raise SinkscopeError(
                f"{target} holds files that are not {_with_article(self.name)}'s ({foreign[0]}): give another --out"
            )
        if whole.is_locked(target / UNFINISHED):
            raise SinkscopeError(_measured_elsewhere(target))
        names = [name for name in names if name != UNFINISHED]
        state, unfinished = self.finished(target), unfinished_in(target)
        if unfinished and not (force or resume):
            raise SinkscopeError(
                f"{target} holds an unfinished {self.name}: --resume goes on with it, --force starts anew"
            )
        if state and not force and not unfinished:
            raise SinkscopeError(
                f"{target} holds a finished {self.name}: --force (force=True) replaces it; or give another --out"
            )
        if names and not unfinished and state is None:
            raise SinkscopeError(
                f"{target} holds files named like {_with_article(self.name)}'s, but no {self.name} of sinkscope's: "
                "give another --out"
            )
        check_place(target)

    def settle(self, target: Path) -> None:
        """Finishes a write into `target` that was killed after its result was whole; called before every reading.

        Raises SinkscopeError where that fails: the folder cannot be written, or its journal is damaged.
        """
        try:
            whole.settle(target, {*self.files, UNFINISHED})
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or f"{whole.JOURNAL} in it is damaged"
            raise SinkscopeError(
                f"{target} holds {_with_article(self.name)} whose writing was interrupted, and {whole.COMMITTED} in it "
                f"cannot be moved into place: {reason}"
            ) from None

    def write(
        self, folder: str | Path, force: bool, fill: Callable[[Path], None], resume: bool = False,
        keep_shards: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Lets `fill` write into a temporary folder, puts that into place, and returns the paths of all files.

        After a kill or a power cut at any moment the folder holds the old result, the new one, or none:

        - A new result is written beside its place and renamed to it.
        - A result that replaces another is written beside it, and the two folders are exchanged in one step. The
          folder keeps its mode. This needs Linux (renameat2) and a file system that can do it.
        - Elsewhere, and where the folder is a mount point, the working folder, another user's, or its parent cannot
          be written, the result is written inside. One rename decides that it counts; then file after file is moved.
          A kill among these moves leaves old and new files side by side. The next command of sinkscope's that reads or
          writes the folder finishes the moves first.

        A link to a folder stays. Shards in it go away with the old result, unless `keep_shards`. Temporary folders of
        a killed process are removed by the next write to the same place.

        Raises SinkscopeError as `check` does, and where the disk is full or not writable; the folder is then unchanged.
        """
        target = Path(folder).resolve()
        self.check(target, force, resume)
        made = [parent for parent in (target, *target.parents) if not parent.exists()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            whole.remove_leftovers(target)
            if not (whole.may_be_replaced(target) and self._beside(target, fill, keep_shards)):
                self._inside(target, fill, keep_shards)
        except BaseException as error:
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            if isinstance(error, OSError):
                raise SinkscopeError(f"cannot write {folder}: {error.strerror or error}") from None
            raise
        return sorted(Path(folder) / path.name for path in target.iterdir() if path.name in self.files)

    def _beside(self, target: Path, fill: Callable[[Path], None], keep_shards: bool) -> bool:
        """Writes beside `target` and exchanges the two; False, with nothing changed, where that cannot be done here."""
        with contextlib.ExitStack() as stack:
            try:
                work = stack.enter_context(whole.work_in(target.parent, f".{target.name}{WORK}"))
                if not whole.like(work.run, target):
                    return False
            except OSError:  # the parent cannot be written, or the name is too long for a prefix
                return False
            fill(work.run)
            if keep_shards and (target / UNFINISHED).is_dir():
                whole.link_files(target / UNFINISHED, work.run / UNFINISHED)
            whole.sync_tree(work.run)
            return whole.put(work.run, target)

    def _inside(self, target: Path, fill: Callable[[Path], None], keep_shards: bool) -> None:
        target.mkdir(exist_ok=True)
        try:
            with whole.work_in(target, WORK) as work:
                fill(work.run)
                whole.commit(work.run, target, {UNFINISHED} if keep_shards else set())
                self.settle(target)
        finally:
            self.settle(target)  # after Ctrl-C among its moves


_HELD: set[Path] = set()
"""The lock files that this process holds by `measuring`."""


@contextlib.contextmanager
def measuring(target: Path) -> Iterator[None]:
    """Lets no other process measure into `target` until the block ends. Its folder of shards must be there.

    Within such a block of the same folder, another one does nothing. Raises SinkscopeError where another process
    measures into it, and OSError where the folder cannot be written.
    """
    path = (target / UNFINISHED / whole.LOCK).absolute()
    if path in _HELD:
        yield
        return
    while (lock := whole.locked(path.parent)) is not None and not whole.is_open_file(path, lock):
        os.close(lock)  # its holder has removed it meanwhile
    if lock is None:
        raise SinkscopeError(_measured_elsewhere(target))
    _HELD.add(path)
    try:
        yield
    finally:
        _HELD.remove(path)
        if whole.WINDOWS:
            os.close(lock)
        with contextlib.suppress(OSError):
            path.unlink()
        if not whole.WINDOWS:
            os.close(lock)


@contextlib.contextmanager
def taken(target: Path) -> Iterator[None]:
    """Takes `target` for a measurement that is about to load its model: as `measuring`, but makes the folder first.
    What is empty of it at the end of the block is removed.

    Raises SinkscopeError where another process measures into it, or the folder cannot be written.
    """
    made = [path for path in (target / UNFINISHED, target, *target.parents) if not path.exists()]
    try:
        with contextlib.ExitStack() as stack:
            try:
                (target / UNFINISHED).mkdir(parents=True, exist_ok=True)
                stack.enter_context(measuring(target))
            except OSError as error:
                raise SinkscopeError(f"cannot write {target}: {error.strerror or error}") from None
            yield
    finally:
        with contextlib.suppress(OSError):
            for path in dict.fromkeys((target / UNFINISHED, *made)):
                path.rmdir()


def unfinished_in(target: Path) -> bool:
    """Whether the folder holds an unfinished measurement: more than the lock of a process that was killed before its
    first batch."""
    shards = target / UNFINISHED
    if shards.is_symlink() or not shards.is_dir():
        return os.path.lexists(shards)
    return any(path.name != whole.LOCK for path in shards.iterdir())


def _measured_elsewhere(target: Path) -> str:
    return f"another process measures into {target} just now: wait until it has ended, or give another --out"


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def folder_of(given: Any) -> Path:
    """The path of a folder that a program names. Raises SinkscopeError for what names none."""
    try:
        return Path(given)
    except TypeError:
        raise SinkscopeError(f"the path of a folder is needed, not {type(given).__name__}") from None


def check_place(target: Path) -> None:
    """Tests, before anything is measured, that the nearest existing folder can be written to, and that the path is
    text, as Parquet files need it. Raises SinkscopeError."""
    if not is_text(os.path.realpath(target)):
        raise SinkscopeError(f"cannot write to {target}: the name of a folder in its path is not UTF-8; rename it")
    nearest = next(path for path in (target, *target.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise SinkscopeError(f"cannot write to {nearest}: {error.strerror}; give another --out") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises OSError, also where it is a pipe."""
    with whole.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kept_json(path: Path) -> dict[str, Any]:
    """What a JSON file of an unfinished measurement holds; empty where it is damaged or missing.

    Raises SinkscopeError as `need_file` does.
    """
    need_file(path)
    try:
        content = json.loads(whole.read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def need_file(path: Path) -> None:
    """Raises SinkscopeError where something else than a file stands there: reading a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise SinkscopeError(f"{path} is no file: remove it, or start anew with --force")


def sha256_of_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by name. Raises OSError."""
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir())}


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, as `write_files` does."""
    write_files({path: content})


def write_files(contents: Mapping[Path, str | bytes]) -> None:
    """Writes files whole, and all of them or none: each into a temporary folder beside it, then all are renamed to
    their places. A link stays a link. The folder of a process that was killed is removed by the next that writes there.

    A device, a pipe and a stream of this process (/dev/stdout) cannot be replaced: the content is written into them,
    after all other files. Raises SinkscopeError where one cannot be written; BrokenPipeError where the reader of a pipe
    has gone.
    """
    staged: dict[Path, Path] = {}
    folders: dict[Path, Path] = {}
    path = Path()
    try:
        with contextlib.ExitStack() as ended:
            for path in contents:
                if _own_stream(path) is None and _may_be_replaced(path):
                    target = Path(os.path.realpath(path))
                    if target.parent not in folders:
                        whole.remove_leftovers(target.parent)
                        folders[target.parent] = ended.enter_context(whole.work_in(target.parent, WORK)).run
                    staged[target] = folders[target.parent] / str(len(staged))
                    staged[target].write_bytes(_as_bytes(contents[path]))
                    whole.sync_file(staged[target])
            _replaced(staged)
            for folder in folders:
                whole.sync_folder(folder)
        for path in contents:
            if Path(os.path.realpath(path)) not in staged:
                _write_into(path, _as_bytes(contents[path]))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SinkscopeError(f"cannot write {error.filename2 or path}: {error.strerror or error}") from None


def _replaced(staged: Mapping[Path, Path]) -> None:
    """Renames each staged file over its target. Where one cannot be renamed, as over another user's file in /tmp, the
    targets before it are put back as they were. Raises OSError."""
    before: dict[Path, Path | None] = {}
    try:
        for target, temporary in staged.items():
            if len(staged) > 1:
                before[target] = _second_name(target, temporary.with_suffix(".before"))
            temporary.replace(target)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename2 = str(target)
        for done, old in before.items():
            with contextlib.suppress(OSError):
                if old is not None:
                    old.replace(done)
                elif not staged[done].exists():
                    done.unlink()
        raise


def _second_name(path: Path, second: Path) -> Path | None:
    """Gives the file a second name and returns that; None where there is no file. Raises OSError."""
    if not path.exists():
        return None
    try:
        second.hardlink_to(path)
    except OSError:  # a file system without links, or another user's file
        shutil.copy2(path, second)
    return second


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _write_into(path: Path, data: bytes) -> None:
    """Writes into a device, a pipe or a stream of this process."""
    stream = _own_stream(path)
    with path.open("wb") if stream is None else os.fdopen(os.dup(stream), "wb") as file:
        file.write(data)


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


# Tables as Parquet: what its library says of a failure becomes one line.


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """The table as a Parquet file, without its index. Raises SinkscopeError where pyarrow fails."""
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, index=False)
    except Exception as error:  # a full memory, a version that does not go with pandas: pyarrow may raise anything
        raise SinkscopeError(f"pyarrow cannot write a table as Parquet: {first_line(error)}") from error
    return buffer.getvalue()


def save_parquet(table: pd.DataFrame, path: Path) -> None:
    """Writes the table to a new file. Raises OSError where the disk is full; SinkscopeError where pyarrow fails."""
    try:
        table.to_parquet(path, index=False)
    except OSError as error:
        if error.errno is None:  # pyarrow's own, not the disk's
            raise SinkscopeError(f"pyarrow cannot write {path.name}: {first_line(error)}") from error
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None  # without pyarrow's words
    except Exception as error:
        raise SinkscopeError(f"pyarrow cannot write {path.name}: {first_line(error)}") from error
