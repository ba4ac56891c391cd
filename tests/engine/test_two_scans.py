"""Two processes that measure into one folder: the second is refused in a line, and the first loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Refused, Scan

import sinkscope
from sinkscope.errors import SinkscopeError
from sinkscope.runs import whole
from sinkscope.runs.folder import UNFINISHED, measuring

OPTIONS: dict[str, Any] = {"data": ["prose"], "num_sequences": 4, "seq_len": 16}
SAID = "another process measures into {} just now: wait until it has ended, or give another --out"


@pytest.fixture
def measured_elsewhere(tmp_path: Path) -> Path:
    """A run folder as a scan leaves it between two of its batches."""
    shards = tmp_path / "results" / "run" / UNFINISHED
    shards.mkdir(parents=True)
    for name in ("key.json", "000-00000000.safetensors"):
        (shards / name).write_text("theirs", "utf-8")
    return shards.parent


def theirs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / UNFINISHED).iterdir() if path.read_text("utf-8") == "theirs")


@pytest.mark.parametrize("option", ["--force", "--resume"])
def test_the_command_is_refused_before_the_model_is_looked_at(
    option: str, measured_elsewhere: Path, refused: Refused
) -> None:
    """--force removed the other scan's batches, and both scans failed."""
    before = theirs(measured_elsewhere)
    with measuring(measured_elsewhere):
        assert refused("./no-such-model", option) == SAID.format(measured_elsewhere)
    assert theirs(measured_elsewhere) == before


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock as another process does: in a process that measures, `measuring` locks it once."""
    lock = whole.locked(folder / UNFINISHED)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)


def test_a_scan_that_chose_the_folder_at_the_same_time_is_refused(measured_elsewhere: Path, tiny_model: Any) -> None:
    """The folder was free when both looked, before they loaded their models."""
    before, ids = theirs(measured_elsewhere), list(range(64))
    with locked(measured_elsewhere), pytest.raises(SinkscopeError, match="another process measures into"):
        sinkscope.scan(tiny_model, **OPTIONS | {"data": [ids]}, shards=measured_elsewhere)
    assert theirs(measured_elsewhere) == before


def test_arms_are_refused_too(measured_elsewhere: Path, tiny_model: Any) -> None:
    before, rows = theirs(measured_elsewhere), [list(range(64)), list(range(100, 164))]
    with locked(measured_elsewhere), pytest.raises(SinkscopeError, match="another process measures into"):
        sinkscope.arms(tiny_model, ["keys:first1"], data=rows, seq_len=16, shards=measured_elsewhere)
    assert theirs(measured_elsewhere) == before


def test_a_scan_that_has_ended_holds_nothing(tiny_folder: Path, scan_cli: Scan) -> None:
    assert scan_cli(tiny_folder).code == 0
    assert scan_cli(tiny_folder, "--force").code == 0


def test_shards_that_are_a_link_are_left_alone(tiny_model: Any, tmp_path: Path) -> None:
    """What a link leads to need not be a scan's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine", "utf-8")
    (tmp_path / UNFINISHED).symlink_to(tmp_path / "mine")
    with pytest.raises(SinkscopeError, match="it is a link"):
        sinkscope.scan(tiny_model, **OPTIONS | {"data": [list(range(64))]}, shards=tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
