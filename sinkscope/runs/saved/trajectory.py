"""The folder of a track: a run folder for each step, and the tables and figures of all steps, which are replaced
together. trajectory.csv alone may also be SinkCallback's, whose measurements cannot be made again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs import whole
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.run import finished
from sinkscope.runs.schema.other_tables import TRAINING_TABLES

TRAJECTORY_FILE, EMERGENCE_FILE = "trajectory.csv", "emergence.csv"
FILES = (TRAJECTORY_FILE, EMERGENCE_FILE, "trajectory.png", "trajectory.svg")
"""What a track writes beside its run folders."""

COLUMNS = [column.name for column in table_columns(TRAINING_TABLES["trajectory"])]
STEP = re.compile(r"step-([0-9]{8,12})")


def step_folder(step: int) -> str:
    """Name of a step's run folder; names sort as the steps do, up to 99,999,999."""
    return f"step-{step:08}"


def finished_steps(out: Path) -> dict[int, Path]:
    """The finished run folders of a track, by step."""
    folders = {}
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        named = STEP.fullmatch(path.name)
        if named is not None and path.name == step_folder(int(named[1])) and finished(path):
            folders[int(named[1])] = path
    return folders


def read_rows(path: Path, instead: str) -> pd.DataFrame:
    """The rows of a trajectory.csv as they are written, as text but for `step`.

    `instead`: what the user may give instead, such as `--out`. Raises SinkscopeError where the file is no trajectory.
    """
    try:
        if not path.is_file():
            raise ValueError
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        if list(rows.columns) != COLUMNS:
            raise ValueError
        return rows.assign(step=[int(step) for step in rows["step"]])
    except (OSError, ValueError):
        raise SinkscopeError(f"{path} is no trajectory of sinkscope's: move it, or give another {instead}") from None


def check_tables(out: Path) -> None:
    """Raises SinkscopeError where files of a track's names stand in the folder that no track wrote.

    A trajectory.csv is a track's own where emergence.csv stands beside it and each of its steps has a finished run
    folder: then all its numbers can be made again.
    """
    try:
        whole.settle(out, FILES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SinkscopeError(f"{out} holds tables whose writing was interrupted: {error}; remove them") from None
    files = [name for name in FILES if (out / name).exists()]
    if not files:
        return
    path, mend = out / TRAJECTORY_FILE, "move it, or give another --out"
    if TRAJECTORY_FILE not in files:
        raise SinkscopeError(f"{out / files[0]} stands there without the {path.name} that track writes: {mend}")
    unknown = sorted(set(read_rows(path, "--out")["step"]) - set(finished_steps(out)))
    if unknown:
        raise SinkscopeError(
            f"{path} holds step {unknown[0]}, of which no run folder stands there, so that it cannot be made again "
            f"(SinkCallback writes such a file): {mend}"
        )
    if EMERGENCE_FILE not in files:
        raise SinkscopeError(f"{path} has no {EMERGENCE_FILE} beside it, so no track wrote it: {mend}")


def write_tables(out: Path, content: Mapping[str, bytes]) -> list[Path]:
    """Replaces all files of FILES by these, by name: all or nothing, also after a kill. Returns their paths.

    Raises SinkscopeError where the folder cannot be written; its files are then unchanged.
    """
    try:
        whole.remove_leftovers(out)
        with whole.work_in(out, whole.WORK) as work:
            for name, data in content.items():
                (work.run / name).write_bytes(data)
            try:
                whole.commit(work.run, out, ())
            finally:
                whole.settle(out, FILES)  # also after Ctrl-C behind the commit, which decides
    except OSError as error:
        raise SinkscopeError(f"cannot write {out}: {error.strerror or error}") from None
    return [out / name for name in content]
