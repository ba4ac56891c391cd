"""Runs as a dataset folder of the model hub: a Parquet file for each table, all runs in it, and the dataset's card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from sinkscope.present.text import markdown_cell
from sinkscope.runs.atlas import atlas, atlas_table, run_names
from sinkscope.runs.moved import IN_TABLES, refuse_mixed
from sinkscope.runs.parquet import parquet_bytes
from sinkscope.runs.per_sequence import domains
from sinkscope.runs.questions import tables_of_questions
from sinkscope.runs.run import TABLES
from sinkscope.runs.schema.other_tables import ATLAS_TABLE
from sinkscope.runs.schema.tables import TABLES as DESCRIBED

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

CARD, ATLAS = "README.md", ATLAS_TABLE.name
FILES = frozenset({CARD, *(f"{name}.parquet" for name in (ATLAS, *TABLES))})
"""All files that such a folder may hold."""
KEYS = {name: {key.name for key in table.keys} for name, table in (DESCRIBED | tables_of_questions()).items()}
"""The columns that identify a row of each table."""
ROWS = {name: table.row for name, table in (DESCRIBED | tables_of_questions()).items()} | {ATLAS: ATLAS_TABLE.row}
"""What one row of each table stands for."""


def dataset_files(runs: list[Run]) -> dict[str, bytes]:
    """Every file of the folder by its name. The columns `run` and `model` come first in each table; `domain` is filled
    in where a run has one text.

    Raises SinkscopeError where a column would hold what some of the runs measured otherwise.
    """
    refuse_mixed(IN_TABLES, [run.manifest for run in runs])
    tables = {ATLAS: atlas_table(atlas(runs)), **_joined(runs)}
    files = {f"{name}.parquet": parquet_bytes(table) for name, table in tables.items()}
    return {CARD: dataset_card(runs, tables).encode(), **files}


def _joined(runs: list[Run]) -> dict[str, pd.DataFrame]:
    """Each table with the rows of every run that has it."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, run in zip(run_names(runs), runs, strict=True):
        for table, rows in run.tables().items():
            parts.setdefault(table, []).append(_named(run, name, table, rows))
    return {table: pd.concat(parts[table], ignore_index=True) for table in TABLES if table in parts}


def _named(run: Run, name: str, table: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns that lead every table, text as text."""
    leading = {"run": name, "model": run.manifest.model.shown}
    if "domain" in KEYS[table] and "domain" not in rows:
        leading["domain"] = domains(run)[0].domain
    text = dict.fromkeys(rows.select_dtypes(include=["object", "string"]), "string")
    return pd.concat([pd.DataFrame(leading, rows.index, dtype="string"), rows.astype(text)], axis=1)


def dataset_card(runs: list[Run], tables: dict[str, pd.DataFrame]) -> str:
    """The card: a YAML head with one configuration for each table, the runs, and what the tables hold."""
    head = ["---", "pretty_name: Attention sinks", "tags:", "- attention-sinks", "- interpretability", "configs:"]
    for name in tables:
        head += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}.parquet"]
    lines = ["# Attention sinks", "", "Measured by sinkscope; each row names its run and its model.", "", "## Runs", ""]
    for name, run in zip(run_names(runs), runs, strict=True):
        model = run.manifest.model
        read = "; ".join(f"{d.domain}: {d.sequences} sequences of {d.seq_len} tokens" for d in domains(run))
        complete = "" if run.manifest.complete else ", interrupted"
        facts = f"{name}: {model.shown}, revision {model.revision or '-'}, {model.dtype}, {read}"
        facts += f"; weights {(model.weights_sha256 or '-')[:12]}; sinkscope {run.manifest.sinkscope}{complete}"
        lines.append(f"- {markdown_cell(facts)}")
    lines += [
        "",
        "## Tables",
        "",
        "`sinkscope schema NAME` describes the columns. A missing value is null.",
        "",
    ]
    lines += [f"- `{name}`: a row is {ROWS[name]}; {len(table)} rows." for name, table in tables.items()]
    return "\n".join([*head, "---", "", *lines, ""])
