"""The hub's cache on this machine: which commit a name has there, and which files of it.

huggingface_hub documents its layout: below `models--OWNER--NAME`, `snapshots/COMMIT` holds the files of a commit, and
`refs/REVISION` the commit that a branch, a tag or a short hash named when it was last asked for.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        return sorted(each.name for each in (cache_of(name) / "snapshots").iterdir() if COMMIT.fullmatch(each.name))
    return []


def holds(name: str, commit: str, file: str) -> bool:
    """Whether the cache has a file of a commit."""
    return (cache_of(name) / "snapshots" / commit / file).is_file()


def find_snapshot(name: str, revision: str | None) -> Snapshot | None:
    """The snapshot that a revision of a hub id means, as far as the cache knows; None where it does not know.

    A branch and a tag are known by `refs`, a commit by its folder, the beginning of a hash by the one folder that
    begins so. sinkscope once kept no `refs`: without any, the only snapshot there is stands for the main branch.
    """
    commits, asked, warning = cached_commits(name), revision or MAIN, None
    commit = asked if COMMIT.fullmatch(asked) else _named(name, asked)
    if commit is None and revision is None and len(commits) == 1 and not _has_refs(name):
        commit = commits[0]
        warning = (
            f"the cache does not say which commit of {name} is its main branch: the only one there, {commit}, is "
            "measured; one scan with the hub in reach settles it"
        )
    if commit is None and revision is not None:
        near = [
            each for each in commits if each == revision or (SHORT.fullmatch(revision) and each.startswith(revision))
        ]
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
