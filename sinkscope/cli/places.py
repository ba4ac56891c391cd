"""Where a result goes when no --out is given: beside what is there, never over it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinkscope.runs.folder import KEY, UNFINISHED

SETTINGS: tuple[Any, ...] = ("text", "columns", "rounding")
"""The parts of a request that an unfinished scan and the one that goes on with it must share."""


def free_folder(base: Path) -> Path:
    """`base`, or the first of base-2, base-3, ... that is not there or is empty."""
    return next(path for path in _numbered(base) if (not path.is_dir() and not path.exists()) or _empty(path))


def unfinished_folder(base: Path) -> Path:
    """The last of base, base-2, ... that holds what an interrupted measurement has kept; else a free folder."""
    there = list(itertools.takewhile(lambda path: path.exists() and not _empty(path), _numbered(base)))
    return next((path for path in reversed(there) if (path / UNFINISHED).is_dir()), None) or free_folder(base)


def run_folder(base: Path, settings: dict[str, Any], resume: bool, force: bool) -> Path:
    """The run folder of a scan with these settings (`Request.part` of SETTINGS).

    With `force` it is `base`, whose run is replaced. With `resume` it is the last folder that holds an unfinished scan
    of the same settings, else one with a finished scan of the same. Where there is none, it is the last unfinished one:
    the scan is then refused with what differs. In all other cases it is a free folder.
    """
    if force:
        return base
    there = list(itertools.takewhile(lambda path: path.exists() and not _empty(path), _numbered(base)))[::-1]
    unfinished = [path for path in there if (path / UNFINISHED).is_dir()]
    if resume:
        same = [path for path in unfinished if _asked(path / UNFINISHED / KEY) == settings]
        finished = [path for path in there if path not in unfinished]
        done = [path for path in finished if _asked(path / "manifest.json", settings) == settings]
        if same or done or unfinished:
            return [*same, *done, *unfinished][0]
    return free_folder(base)


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")


def _empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _asked(path: Path, names: dict[str, Any] | None = None) -> Any:
    """The settings of the request in a JSON file, those called `names`; None where it holds none."""
    try:
        asked = json.loads(path.read_text("utf-8"))["request"]
        return asked if names is None else {name: asked[name] for name in names}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
