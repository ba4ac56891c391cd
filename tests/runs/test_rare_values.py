"""What a run's files refuse or leave out: a setting of the wrong kind, tables that do not fit, declared names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from desk import scanned

from sinkscope import SinkscopeError, load_run
from sinkscope.metrics.extension import code_sha256
from sinkscope.present.text import readable
from sinkscope.runs.folder import sha256_of
from sinkscope.runs.per_sequence import cells
from sinkscope.runs.request import make_request
from sinkscope.runs.schema.base import plain, to_json
from sinkscope.tables.columns import RUN_COLUMNS, run_column


def test_a_setting_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(SinkscopeError, match=r"^seq_len: must be a valid integer"):
        make_request(model="tiny", data=("prose",), seq_len="many")


def test_missing_values_of_pandas_are_null() -> None:
    assert plain({"a": pd.NA, "b": [np.float64("nan"), np.int64(3)]}) == {"a": None, "b": [None, 3]}


def test_a_carriage_return_does_not_end_its_row(tmp_path: Path) -> None:
    run = scanned()
    run.layers["module"] = "one\rtwo"
    run.save(tmp_path / "run")
    assert set(load_run(tmp_path / "run").layers["module"]) == {"one\rtwo"}


def test_a_run_whose_manifest_forgets_a_table(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    del data["tables"]["layers"]
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(SinkscopeError, match="is damaged: its manifest names no table layers"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("share", [0, 2])
def test_a_manifest_that_is_cut_off_is_a_damaged_one(share: int, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // share] if share else b"")
    with pytest.raises(SinkscopeError, match=r"^run .*run is damaged: its manifest\.json is cut off, or is no JSON$"):
        load_run(tmp_path / "run")
    path.write_text('{"name": "an app"}', "utf-8")
    with pytest.raises(SinkscopeError, match="is not a run folder: it holds no manifest of sinkscope's"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(("table", "column"), [("layers", "stream"), ("heads", "head")])
def test_a_table_without_the_column_that_tells_its_rows_apart(table: str, column: str, tmp_path: Path) -> None:
    """Its manifest agrees with it, as where both were made by another tool."""
    scanned().save(tmp_path / "run")
    path, file = tmp_path / "run" / "manifest.json", tmp_path / "run" / f"{table}.csv"
    pd.read_csv(file).drop(columns=column).to_csv(file, index=False)
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    data["files"][file.name] = sha256_of(file)
    del data["tables"][table]["columns"][column]
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(SinkscopeError, match=f"is damaged: {table}.csv has no column {column}"):
        load_run(tmp_path / "run")


def test_sequences_that_do_not_hold_the_same_heads() -> None:
    run = scanned()
    run.sequences = run.sequences.drop(index=run.sequences.index[run.sequences["head"] == 1][:1])
    with pytest.raises(SinkscopeError, match="its sequences do not hold the same heads"):
        cells(run, run.manifest.data[0].domain, "head", ["bos_mass"])


def test_a_column_of_the_whole_run_is_declared_once() -> None:
    table = next(table for table, columns in RUN_COLUMNS.items() if columns)
    name = next(iter(RUN_COLUMNS[table]))
    declare = run_column(table, unit="ratio", range="[0, 1]", source="none")

    def again() -> None:
        """Nothing."""

    again.__name__ = name
    with pytest.raises(SinkscopeError, match=f"column {name} of the whole run is declared a second time"):
        declare(again)


def test_the_code_of_a_metric_typed_into_a_session() -> None:
    """It has no file: other code gives another hash, the same code the same one."""

    def typed(text: str) -> Any:
        names: dict[str, Any] = {}
        exec(compile(text, "<stdin>", "exec"), names)
        return names["own"]

    first, again, other = (typed(f"def own(view):\n    return view + {number}") for number in (1, 1, 2))
    assert code_sha256(first) == code_sha256(again) != code_sha256(other)


def test_json_holds_no_code_of_a_terminal() -> None:
    name = "a\x1b[31m\x9b31m\u202eb\u2066c\x7fd é"
    text = to_json({"name": name})
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == {"name": name}
    assert "é" in text


def test_a_file_shown_on_a_terminal_keeps_its_lines() -> None:
    assert readable("a\tb\n::c\x1b[2J\x9b\n") == "a\tb\n::c\\x1b[2J\\x9b\n"
    assert readable("\u3000\xa0é\u202e") == "\u3000\xa0é\\u202e"
