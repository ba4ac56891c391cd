"""A run: the tables, summary and manifest of one scan. Saving it to a folder writes all of it or nothing."""

from __future__ import annotations

import csv
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sinkscope.errors import SinkscopeError, did_you_mean, first_line
from sinkscope.runs.catalogue import near_column
from sinkscope.runs.folder import UNFINISHED, FolderKind, folder_of, save_parquet, sha256_of, sha256_of_files
from sinkscope.runs.per_sequence import sequences_of, tells_sinks, tokens_of
from sinkscope.runs.questions import tables_of_questions
from sinkscope.runs.schema.base import read_record, to_json
from sinkscope.runs.schema.manifest import READ, Manifest, TableFacts
from sinkscope.runs.schema.old import AS_OLD_AS, manifest_from_0_1
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.schema.tables import TABLES as SCHEMAS
from sinkscope.runs.showing import ShownRun
from sinkscope.runs.whole import read_file

MEASURED_TABLES = tables_of_questions()


def _with_measured(*tables: str, ending: str) -> tuple[str, ...]:
    """The tables, then those that measurements write in files of this ending."""
    return *tables, *(name for name, table in MEASURED_TABLES.items() if table.file.endswith(ending))


CSV_TABLES = _with_measured("heads", "layers", "length_curve", "domains", "tokens", ending=".csv")
PARQUET_TABLES = _with_measured("positions", "stretches", "sequences", "sinks", ending=".parquet")
TABLES = CSV_TABLES + PARQUET_TABLES
OPTIONAL = frozenset({"domains", "stretches", "sinks", "tokens", *MEASURED_TABLES})
"""Tables that only some runs have; runs of an older sinkscope lack `sinks` and `tokens`."""

SHOWN_FIRST = (
    "layer", "head", "kind", "bos_mass", "bos_mass_sem", "sink_score", "entropy", "honor", "dormant", "pattern",
)  # fmt: skip
"""The columns of heads that `Run.show` shows."""

NAMED = 4
"""Most runs that are named where a folder of several is given for one."""
FORMATS = ("csv", "parquet")
FILES = frozenset(
    {"manifest.json", "summary.json", *(f"{name}.csv" for name in CSV_TABLES), *(f"{name}.parquet" for name in TABLES)}
)
"""All files that a finished run folder may hold; a folder with any other file is never written to."""


@dataclass
class Run(ShownRun):
    """The result of one scan. `sinkscope metrics` lists the columns, `sinkscope schema` those of every file.

    Attributes:
        heads: one row per (stream, layer, head): means over sequences with their standard errors, `<name>_sem`.
        layers: one row per (stream, layer), in the same form.
        positions: alpha, bos_mass and bos_share of every head at every position below 4,096.
        stretches: the same from there on, for stretches of positions; None where no sequence is that long.
        length_curve: bos_mass, sink_score and sink_rate of prefixes of the sequence.
        sequences: every metric of every sequence; all means, errors and paired tests are computed from these.
        sinks: one row for every sink of every sequence. tokens: the tokens that are sinks, with their rates. Both are
            None for a run of an older sinkscope.
        measured: the tables of the measurements asked for, by name: those of `smoothing` and others.
        summary: the answer (summary.json). manifest: how it was measured (manifest.json).
        domains: BOS mass of every head compared between each pair of domains; None where there is one domain.
        shards: the folder in which the scan keeps its shards; a run saved there replaces them.
        path: the folder that the run was saved to or loaded from; None before that.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame
    positions: pd.DataFrame
    length_curve: pd.DataFrame
    sequences: pd.DataFrame
    summary: Summary
    manifest: Manifest
    domains: pd.DataFrame | None = None
    stretches: pd.DataFrame | None = None
    sinks: pd.DataFrame | None = None
    tokens: pd.DataFrame | None = None
    measured: dict[str, pd.DataFrame] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)
    shards: Path | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """One line; `show()` gives a short table, `summary` the answer."""
        data = ", ".join(
            f"{sequences_of(self, data)} x {tokens_of(data)} of {data.domain}" for data in self.manifest.data
        )
        data += "" if self.manifest.complete else " (interrupted)"
        epsilon = self.summary.epsilon
        counts = [
            f"{stream.sink_heads} of {stream.heads} heads with a sink"
            if tells_sinks(self, name, stream.uniform_alpha_0.T, epsilon)
            else f"{stream.heads} heads, whose sinks no threshold tells"
            for name, stream in self.summary.streams.items()
        ]
        return f"<Run of {self.manifest.model.shown}, {data}: {', '.join(counts)}>"

    def show(self, *more: str) -> pd.DataFrame:
        """The head table with the few columns that are read first, and `more`; `heads` holds all of them.

        Raises SinkscopeError for a name that is no column of `heads`.
        """
        for name in more:
            if name not in self.heads:
                raise SinkscopeError(f"{name!r} is no column of heads{near_column(name, self.heads)}")
        keys = [name for name in ("domain", "stream") if name in self.heads and self.heads[name].nunique() > 1]
        return self.heads[[*dict.fromkeys((*keys, *SHOWN_FIRST, *more))]]

    @property
    def smoothing(self) -> pd.DataFrame | None:
        """One row per (stream, layer, head); None unless smoothing was asked for."""
        return self.measured.get("smoothing")

    def save(self, folder: str | Path, force: bool = False, formats: tuple[str, ...] = ("csv",)) -> list[Path]:
        """Writes the run folder and returns its files. After a kill it holds the old run, the new one, or none.

        Raises SinkscopeError where the folder holds a finished run (unless `force`) or files that are not a run's, and
        where the disk is full or not writable. The folder is then unchanged.
        """
        folder = folder_of(folder)
        holds_shards = self.shards is not None and self.shards.resolve() == folder.resolve()
        try:
            written = RUN_FOLDER.write(
                folder, force, lambda work: self._write(work, formats), resume=holds_shards,
                keep_shards=holds_shards and not self.manifest.complete,
            )  # fmt: skip
        except SinkscopeError as error:
            kept = "; what was measured is kept in its shards: --resume writes it" if holds_shards else ""
            raise SinkscopeError(f"{error}{kept}") from None
        self.path = Path(folder)
        return written

    def _write(self, folder: Path, formats: tuple[str, ...]) -> None:
        tables = self.tables()
        self.manifest.tables = {name: _shape(table) for name, table in tables.items()}
        for name, table in tables.items():
            if name in PARQUET_TABLES:
                save_parquet(table, folder / f"{name}.parquet")
                continue
            table.to_csv(
                folder / f"{name}.csv", index=False, float_format="%.9g", lineterminator="\n", quoting=_quoting(table)
            )
            if "parquet" in formats:
                save_parquet(table, folder / f"{name}.parquet")
        (folder / "summary.json").write_text(to_json(self.summary.as_dict()), encoding="utf-8")
        self.manifest.files = sha256_of_files(folder)
        (folder / "manifest.json").write_text(to_json(self.manifest.as_dict()), encoding="utf-8")

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table that this run has, by name."""
        frames = {name: getattr(self, name) for name in TABLES if name not in MEASURED_TABLES} | self.measured
        return {name: frames[name] for name in TABLES if frames.get(name) is not None}


def need_run(given: object) -> None:
    """Raises SinkscopeError for what is no Run, such as the name of its folder."""
    if not isinstance(given, Run):
        kind = type(given).__name__
        raise SinkscopeError(f"a Run is needed, not {kind}: sinkscope.load_run(FOLDER) reads one that was saved")


def _what_it_holds(folder: Path) -> str:
    """What to do about a folder without a manifest of sinkscope's."""
    runs = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
    if not runs:
        return "it holds no manifest of sinkscope's; `sinkscope scan MODEL --out FOLDER` writes one"
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return f"it holds the folders {', '.join(runs[:NAMED])}{more}: name one of them"


def _instead(folder: Path) -> str:
    """What to do about a run folder that is not there: the runs beside it with a near name, or a scan of the model."""
    if folder.name.startswith("example:"):
        return f"; that is a model, and `sinkscope scan {folder}` writes its run folder"
    beside = [path.parent.name for path in folder.parent.glob("*/manifest.json")]
    return did_you_mean(folder.name, beside, "" if folder.parent == Path() else f"{folder.parent}/")


def load_run(path: str | Path) -> Run:
    """Reads a run folder, also one written by sinkscope 0.1.

    Raises SinkscopeError where it is no run folder, a file is missing, unreadable, damaged or another run's, or a newer
    sinkscope wrote it. Runs whose manifest holds no SHA-256 of the files are held to their rows and columns only.
    """
    folder = folder_of(path)
    try:
        if not folder.exists():
            raise SinkscopeError(f"no such run folder: {folder}{_instead(folder)}")
        RUN_FOLDER.settle(folder)
        content = _read_json(folder / "manifest.json")
    except OSError as error:
        raise SinkscopeError(f"cannot read the run folder {folder}: {error.strerror}") from None
    if content is None and _is_no_json(folder / "manifest.json"):
        raise SinkscopeError(f"run {folder} is damaged: its manifest.json is cut off, or is no JSON")
    if content is None:
        raise SinkscopeError(f"{folder} is not a run folder: {_what_it_holds(folder)}")
    manifest = read_manifest(content, f"manifest.json of the run {folder}")
    try:
        _check_content(folder, "summary.json", manifest.files)
        answer = json.loads(read_file(folder / "summary.json"))
        expected = [name for name in TABLES if name not in OPTIONAL or name in manifest.tables]
        missing = [name for name in expected if name not in manifest.tables]
        if missing:
            raise ValueError(f"its manifest names no table {missing[0]}")
        tables = {name: _read_table(folder, name, manifest) for name in expected}
    except PermissionError as error:
        raise SinkscopeError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    except Exception as error:  # pandas and pyarrow raise anything over a damaged file
        raise SinkscopeError(f"run {folder} is damaged: {first_line(error)}") from None
    if isinstance(answer, dict) and answer.get("schema_version") == 1:
        answer["schema_version"] = AS_OLD_AS
    summary = read_record(Summary, answer, f"summary.json of the run {folder}")
    measured = {name: tables.pop(name) for name in expected if name in MEASURED_TABLES}
    return Run(**tables, measured=measured, summary=summary, manifest=manifest, path=folder)


def read_manifest(content: dict[str, Any], where: str) -> Manifest:
    """Reads a manifest from its file's JSON. Raises SinkscopeError where it is damaged or of an unknown version."""
    version = content["schema_version"]
    if version == 1:
        try:
            content = manifest_from_0_1(content)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SinkscopeError(f"{where} is damaged: {first_line(error)}") from None
    elif version not in READ:
        raise SinkscopeError(
            f"{where} has schema version {version}; this sinkscope reads 1 to {READ[-1]}: install the sinkscope that "
            "wrote it, or scan again"
        )
    return read_record(Manifest, content, where)


def _shape(table: pd.DataFrame) -> TableFacts:
    """The rows and column types of a table."""
    return TableFacts(rows=len(table), columns={str(name): str(dtype) for name, dtype in table.dtypes.items()})


def _read_table(folder: Path, name: str, manifest: Manifest) -> pd.DataFrame:
    is_csv, shape = name in CSV_TABLES, manifest.tables[name]
    file = f"{name}.csv" if is_csv else f"{name}.parquet"
    _check_content(folder, file, manifest.files)
    table = _read_csv(folder / file, shape) if is_csv else pd.read_parquet(folder / file)
    missing = [key for key in _places(name) if key not in table]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]}")
    if list(table.columns) != list(shape.columns):
        raise ValueError(f"{file} has other columns than the manifest says")
    if len(table) != shape.rows:
        raise ValueError(f"{file} has {len(table)} rows, and {shape.rows} by the manifest")
    for column, dtype in table.dtypes.items():  # `astype` with a dictionary copies every column, changed or not
        if str(dtype) != (wanted := shape.columns[str(column)]):
            try:
                table[column] = table[column].astype(wanted)
            except (TypeError, ValueError):
                raise ValueError(f"{column} of {file} holds values that are no {wanted}") from None
    if not manifest.files and table.duplicated([key for key in _keys(name) if key in table]).any():
        raise ValueError(f"{file} holds a row twice")
    return table


def _keys(table: str) -> list[str]:
    """The columns that tell the rows of a table apart; a run need not have all of them."""
    return [key.name for key in {**SCHEMAS, **MEASURED_TABLES}[table].keys]


def _places(table: str) -> list[str]:
    """The columns by which every reader finds a row of a table."""
    return [name for name in _keys(table) if name in ("stream", "layer", "head", "position", "length", "sequence")]


def _quoting(table: pd.DataFrame) -> Literal[0, 2]:
    """All text is quoted where some of it holds a carriage return, which csv leaves bare: readers would end the row."""
    maybe = [name for name, kind in table.dtypes.items() if pd.api.types.is_string_dtype(kind)]  # or other objects
    text = [table[name] for name in maybe if pd.api.types.is_string_dtype(table[name])]
    has_return = any(column.str.contains("\r", regex=False).any() for column in text)
    return csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL


def _read_csv(path: Path, shape: TableFacts) -> pd.DataFrame:
    """Text stays text where it looks like a number or a missing value: `1` and `null` are tokens too."""
    text = {name: kind for name, kind in shape.columns.items() if kind == "string"}
    return pd.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])


def _check_content(folder: Path, file: str, known: dict[str, str]) -> None:
    """Raises ValueError where a file is missing, or not the one that the manifest was written with; `known`: empty for
    old runs."""
    if not (folder / file).is_file():
        raise ValueError(f"{file} is missing, or no file")
    if known and sha256_of(folder / file) != known.get(file):
        raise ValueError(
            f"{file} does not belong to this run: it was changed, or another scan wrote it (its SHA-256 is not the "
            "manifest's)"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON of a manifest that sinkscope wrote; None where the file is no such manifest. Raises PermissionError."""
    try:
        manifest = json.loads(read_file(path))
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(manifest, dict) and {"schema_version", "sinkscope", "tables"} <= manifest.keys()
    return manifest if ours else None


def _is_no_json(path: Path) -> bool:
    """Whether the file is there and is no JSON, as one that was cut off."""
    try:
        json.loads(read_file(path))
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True
    return False


def check_target(target: Path, force: bool, resume: bool = False) -> None:
    """Raises SinkscopeError where a new run must not be put into `target`; called before the model is loaded."""
    RUN_FOLDER.check(target, force, resume)


def finished(folder: Path) -> bool:
    """Whether the folder holds a run that was not interrupted. Raises SinkscopeError as `FolderKind.settle` does."""
    RUN_FOLDER.settle(folder)
    return bool(_state(folder))


def remove_run(folder: Path) -> None:
    """Removes the files of a run, and the folder where nothing else is in it."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    for name in sorted(FILES):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files stay in it
        folder.rmdir()


def is_of_run(path: Path) -> bool:
    """Whether the path is a file of a run."""
    return path.name in FILES and path.is_file() and _state(path.parent) is not None


def _state(folder: Path) -> bool | None:
    manifest = _read_json(folder / "manifest.json")
    return None if manifest is None else bool(manifest.get("complete", True))


RUN_FOLDER = FolderKind("run", FILES, _state)
