"""The schema of every file that sinkscope writes: JSON schemas of records, columns of tables."""

from __future__ import annotations

import json
from typing import Any

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.request import Request
from sinkscope.runs.schema.arms_tables import ARMS_TABLES
from sinkscope.runs.schema.atlas_table import ATLAS_TABLE
from sinkscope.runs.schema.base import Record, json_schema
from sinkscope.runs.schema.baseline import BaselineFile
from sinkscope.runs.schema.manifest import Manifest
from sinkscope.runs.schema.measures import MEASURED_TABLES
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.schema.tables import TABLES, TableSchema
from sinkscope.runs.schema.training_tables import TRAINING_TABLES

RECORDS: dict[str, tuple[type[Record], str]] = {
    "manifest": (Manifest, "manifest.json: how a run was measured"),
    "summary": (Summary, "summary.json: the answer"),
    "request": (Request, "what a scan is asked for: part of manifest.json and of a baseline"),
    "baseline": (BaselineFile, "the file of `sinkscope baseline`"),
}

SHOWN = TABLES | MEASURED_TABLES | TRAINING_TABLES | ARMS_TABLES | {ATLAS_TABLE.name: ATLAS_TABLE}


def render_schema(name: str | None) -> str:
    """The JSON schema of a record, or the columns of a table as JSON; without a name, the list of all names.

    Raises SinkscopeError for a name that is neither a record nor a table.
    """
    if name is None:
        return _names()
    if name in RECORDS:
        return _json(json_schema(RECORDS[name][0]))
    if name in SHOWN:
        return _json(table_schema(SHOWN[name]))
    known = [*RECORDS, *SHOWN]
    raise SinkscopeError(f"no file or table {name!r}: choose one of {', '.join(known)}{did_you_mean(name, known)}")


def table_schema(table: TableSchema) -> dict[str, Any]:
    """A table's name, its file, what a row stands for, and its columns in order."""
    columns = [vars(column) for column in table.columns()]
    return {"table": table.name, "file": table.file, "row": table.row, "columns": columns}


def _names() -> str:
    descriptions = {name: what for name, (_, what) in RECORDS.items()}
    descriptions |= {name: f"{table.file}: {table.row}" for name, table in SHOWN.items()}
    width = max(map(len, descriptions))
    return "".join(f"{name:{width}}  {what}\n" for name, what in descriptions.items())


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
