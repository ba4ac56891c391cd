"""A run: tables, summary and manifest of one scan; saved to a folder whole or not at all, and loaded again."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.errors import SinkscopeError

CSV_TABLES = ("heads", "layers", "length_curve")
PARQUET_TABLES = ("positions", "sequences")
FORMATS = ("csv", "parquet")


@dataclass
class Run:
    """What one scan measured.

    Attributes:
        heads: one row per (stream, layer, head); columns of METRICS section 1, means with `<name>_sem`.
        layers: one row per (stream, layer); columns of section 2.
        positions: alpha of every key position.
        length_curve: bos_mass, sink_score, sink_rate of prefixes of the sequence.
        sequences: every metric of every sequence: what all means, errors and paired tests come from.
        summary: the answer in some dozens of numbers (summary.json).
        manifest: how it was measured (manifest.json).
        path: the folder it was saved to or loaded from; None before.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame
    positions: pd.DataFrame
    length_curve: pd.DataFrame
    sequences: pd.DataFrame
    summary: dict[str, Any]
    manifest: dict[str, Any]
    path: Path | None = field(default=None, compare=False)

    def save(self, folder: str | Path, force: bool = False, formats: tuple[str, ...] = ("csv",)) -> list[Path]:
        """Writes the run folder: everything to a temporary folder beside it, then one rename.

        Raises SinkscopeError: the folder holds a finished run (without `force`) or something that is no run; the disk
        is full or not writable. Nothing half-written is left in any of these cases.
        """
        target = Path(folder)
        check_target(target, force)
        work = open_target(target)
        try:
            self._write(work, formats)
            _replace(work, target)
        except OSError as error:
            raise SinkscopeError(f"cannot write {target}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.path = target
        return sorted(target.iterdir())

    def _write(self, folder: Path, formats: tuple[str, ...]) -> None:
        for name in CSV_TABLES:
            table: pd.DataFrame = getattr(self, name)
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.9g", lineterminator="\n")
            if "parquet" in formats:
                table.to_parquet(folder / f"{name}.parquet", index=False)
        for name in PARQUET_TABLES:
            getattr(self, name).to_parquet(folder / f"{name}.parquet", index=False)
        for name in ("summary", "manifest"):
            (folder / f"{name}.json").write_text(to_json(getattr(self, name)), encoding="utf-8")


def load_run(path: str | Path) -> Run:
    """Reads a run folder. Raises SinkscopeError where the folder is none, or a file of it is missing or damaged."""
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        raise SinkscopeError(f"{folder} is not a run folder: it holds no manifest.json")
    try:
        tables = {name: pd.read_csv(folder / f"{name}.csv") for name in CSV_TABLES}
        tables["heads"]["dormant"] = tables["heads"]["dormant"].astype("boolean")
        for name in ("max_abs_token", "max_abs_dim"):
            tables["layers"][name] = tables["layers"][name].astype("Int64")
        tables |= {name: pd.read_parquet(folder / f"{name}.parquet") for name in PARQUET_TABLES}
        texts = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("summary", "manifest")}
    except (OSError, ValueError, KeyError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SinkscopeError(f"run {folder} is damaged: {line}") from None
    return Run(**tables, summary=texts["summary"], manifest=texts["manifest"], path=folder)


def to_json(data: Any) -> str:
    """Strict JSON: NaN and infinities become null."""
    return json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(data: Any) -> Any:
    """The same data in JSON's own types; NaN, infinities and pandas' NA become None."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if data is pd.NA:
        return None
    if hasattr(data, "item"):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def check_target(target: Path, force: bool) -> None:
    """Refuses a folder that a new run must not replace; called before the model is loaded and again before writing."""
    if not target.exists():
        return
    if not target.is_dir():
        raise SinkscopeError(f"{target} is a file: give another --out")
    manifest = target / "manifest.json"
    if not manifest.is_file():
        if any(target.iterdir()):
            raise SinkscopeError(f"{target} is not empty and holds no run: give another --out")
        return
    if not force and _finished(manifest):
        raise SinkscopeError(f"{target} holds a finished run: pass --force to replace it, or another --out")


def open_target(target: Path) -> Path:
    """A temporary folder beside the target: shows before the long part that results can be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise SinkscopeError(f"cannot write to {target.parent}: {error.strerror}; give another --out") from None


def _finished(manifest: Path) -> bool:
    try:
        return bool(json.loads(manifest.read_text("utf-8")).get("complete", True))
    except (OSError, ValueError):
        return True


def _replace(work: Path, target: Path) -> None:
    """Puts the new folder in the old one's place; a run that is replaced goes only once the new one is whole."""
    work.chmod(0o777 & ~_umask())
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        target.rename(old / "run")
        work.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        work.rename(target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
