"""The files of the hub's models: those in its cache on this machine, and downloads by huggingface_hub.

huggingface_hub waits some seconds for each piece of an answer, but for any number of pieces: a hub that sends a byte
now and then would hold a scan for ever."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path, PurePosixPath
from typing import Any

from sinkscope.checkpoints.quiet import Report, silent
from sinkscope.errors import SinkscopeError

SETTING = "SINKSCOPE_HUB_TIMEOUT"
PATIENCE = 300.0
"""Seconds without progress after which a download is given up, unless the environment says otherwise. huggingface_hub
tells of each 10 MiB, so that no connection of 35 kB a second or more is taken for dead."""

SLACK = 2**24
"""Bytes that a file may have beyond twice the size that the hub tells, before its download is ended: the size itself is
checked at the end, and until then a file that unpacks into more would fill the disk."""

WORKER = "sinkscope-download"
"""The name of the threads that download."""


class Stalled(SinkscopeError):
    """The hub has sent next to nothing for as long as is waited."""


class _GivenUp(Exception):
    """Ends a download in its own thread."""


class Transfer:
    """Downloads that belong together: their bytes, and when something last came.

    `report` is called with ("downloading", bytes so far, bytes in all), 0 in all where that is not known.
    """

    def __init__(self, report: Report = silent, total: int = 0) -> None:
        self.patience = _patience()
        self.over = False
        self._report, self._total, self._done = report, total, 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def beat(self) -> None:
        """Something came. Ends the calling download once the transfer is over."""
        self._last = time.monotonic()
        if self.over:
            raise _GivenUp

    def add(self, count: int) -> None:
        """Counts bytes that came."""
        with self._lock:
            self._done = max(0, self._done + count)
            self._report("downloading", min(self._done, self._total) if self._total else self._done, self._total)
        self.beat()

    def run(self, jobs: Sequence[Callable[[], Any]], threads: int = 1) -> list[Any]:
        """Runs the jobs, some at once, and returns what they return. Raises the first error of a job, or Stalled."""
        from huggingface_hub import close_session

        waiting, results, errors = deque(enumerate(jobs)), dict[int, Any](), list[BaseException]()

        def work() -> None:
            try:
                while waiting and not self.over:
                    number, job = waiting.popleft()
                    results[number] = job()
                    self._last = time.monotonic()
            except IndexError:  # another thread took the last one
                pass
            except BaseException as error:
                errors.append(error)

        workers = [
            threading.Thread(target=copy_context().run, args=(work,), name=WORKER, daemon=True)
            for _ in range(min(threads, len(jobs)))
        ]
        with _quiet():
            try:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    while worker.is_alive() and not errors:
                        worker.join(0.1)
                        self._check()
            finally:
                self.over = True
                if any(worker.is_alive() for worker in workers):
                    close_session()  # wakes what waits for the hub
                    for worker in workers:
                        worker.join(1.0)
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(jobs))]

    def _check(self) -> None:
        if time.monotonic() - self._last > self.patience:
            raise Stalled(
                f"the model hub has sent next to nothing for {self.patience:g} s: try again later, or wait longer with "
                f"{SETTING}=SECONDS"
            )


def _patience() -> float:
    value = os.environ.get(SETTING)
    try:
        seconds = float(value) if value else PATIENCE
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SinkscopeError(f"{SETTING}={value} is not a number of seconds above 0")
    return seconds


def download(name: str, file: str, commit: str, transfer: Transfer, most: int | None = None) -> Path:
    """Downloads a file of one commit into the cache, unless it is there.

    `most`: bytes that the file may have at most. Raises SinkscopeError where the hub sends more than that, or a file of
    another commit; what huggingface_hub raises passes through.
    """
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(name, file, revision=commit, tqdm_class=_bar(file, transfer, most)))
    sent_commit = path.parents[len(PurePosixPath(file).parts) - 1].name
    if sent_commit != commit:
        raise SinkscopeError(
            f"the hub gave {file} of {name} from commit {sent_commit}, and was asked for {commit}: try again"
        )
    return path


def _bar(file: str, transfer: Transfer, most: int | None) -> Any:
    """A class in the place of tqdm, which shows nothing and counts what huggingface_hub tells it.

    huggingface_hub makes one for each file, whose `total` are the bytes it expects, and calls `update` for what comes;
    an error that this raises ends the download, and what came of the file is discarded.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.came = 0
            self._check(self.total or 0)
            transfer.beat()

        def update(self, n: float | None = 1) -> None:
            self.came += int(n or 0)
            self._check(self.came)
            transfer.add(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            transfer.beat()  # bytes of packed pieces, which `update` counts once they are unpacked

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """Shows nothing."""

        def _check(self, size: int) -> None:
            if most is not None and size > most:
                raise SinkscopeError(f"the hub sends more of {file} than any such file has: the download was ended")
            if self.total and size > 2 * self.total + SLACK:
                raise SinkscopeError(f"the hub sends more of {file} than the {self.total} bytes that it announced")

    return Bar


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences huggingface_hub, which tells of each attempt; the last one's error is told in one line."""
    logger = getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# The hub's cache on this machine: which commit a name has there, and which files of it.
#
# huggingface_hub documents its layout: below `models--OWNER--NAME`, `snapshots/COMMIT` holds the files of a commit, and
# `refs/REVISION` the commit that a branch, a tag or a short hash named when it was last asked for.


COMMIT = re.compile("[0-9a-f]{40}")
SHORT = re.compile("[0-9a-f]{7,39}")
MAIN = "main"


@dataclass(frozen=True)
class Snapshot:
    """A commit in the cache: its hash, its folder, and a warning where it is not certain that the name means it."""

    commit: str
    folder: Path
    warning: str | None = None


def cache_of(name: str) -> Path:
    """The folder of a hub id in the cache; it need not be there."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name, repo_type="model")


def cached_commits(name: str) -> list[str]:
    """The commits of a hub id that the cache holds files of, sorted."""
    with suppress(OSError):
        return sorted(path.name for path in (cache_of(name) / "snapshots").iterdir() if COMMIT.fullmatch(path.name))
    return []


def holds(name: str, commit: str, file: str) -> bool:
    """Whether the cache has a file of a commit."""
    return (cache_of(name) / "snapshots" / commit / file).is_file()


def find_snapshot(name: str, revision: str | None) -> Snapshot | None:
    """The snapshot that a revision of a hub id means, as far as the cache knows; None where it does not know.

    A branch and a tag are known by `refs`, a commit by its folder, the beginning of a hash by the one folder that
    begins so. sinkscope once kept no `refs`: without any, the only snapshot there is stands for the main branch.
    """
    commits, ref, warning = cached_commits(name), revision or MAIN, None
    commit = ref if COMMIT.fullmatch(ref) else _named(name, ref)
    if commit is None and revision is None and len(commits) == 1 and not _has_refs(name):
        commit = commits[0]
        warning = (
            f"the cache does not say which commit of {name} is its main branch: the only one there, {commit}, is "
            "measured; one scan with the hub in reach settles it"
        )
    if commit is None and revision is not None:
        near = [sha for sha in commits if sha == revision or (SHORT.fullmatch(revision) and sha.startswith(revision))]
        commit = near[0] if len(near) == 1 else None
    return Snapshot(commit, cache_of(name) / "snapshots" / commit, warning) if commit in commits and commit else None


def remember(name: str, revision: str | None, commit: str) -> None:
    """Notes in the cache which commit a revision names, as huggingface_hub does when it downloads by that name.

    Call it once all files of the commit are there: until then the cache goes on naming the commit that it holds whole.
    A cache that cannot be written stays as it is.
    """
    revision = revision or MAIN
    if revision == commit or _ref(name, revision) is None or _named(name, revision) == commit:
        return
    path = cache_of(name) / "refs" / revision
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(commit, encoding="utf-8")
            part.replace(path)  # at once: another process never reads half a hash
        finally:
            part.unlink(missing_ok=True)


def _named(name: str, revision: str) -> str | None:
    """The commit that `refs` has for a revision."""
    path = _ref(name, revision)
    with suppress(OSError, UnicodeDecodeError):
        commit = path.read_text(encoding="utf-8").strip() if path is not None else ""
        return commit if COMMIT.fullmatch(commit) else None
    return None


def _ref(name: str, revision: str) -> Path | None:
    """The file of a revision below `refs`; None for a name that would lead out of it."""
    refs = cache_of(name) / "refs"
    path = Path(os.path.normpath(refs / revision))
    return path if refs in path.parents and "\\" not in revision and "\0" not in revision else None


def _has_refs(name: str) -> bool:
    return any(path.is_file() for path in (cache_of(name) / "refs").rglob("*"))
