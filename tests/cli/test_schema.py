"""`sinkscope schema`: every file of a run folder matches its schema, and every field is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Scan
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.comparison.baseline import baseline_of, baseline_text
from sinkscope.metrics import stretches
from sinkscope.present.terminal.metrics import RECORDS
from sinkscope.runs.questions import declared_options, tables_of_questions
from sinkscope.runs.run import load_run
from sinkscope.runs.schema.base import Record, json_schema
from sinkscope.runs.schema.manifest import Manifest
from sinkscope.runs.schema.other_tables import ARMS_TABLES, TRAINING_TABLES
from sinkscope.runs.schema.tables import TABLES


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, ["schema", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def records(kind: type[Record]) -> set[type[Record]]:
    """A record and all records below it."""
    found = {kind}
    for own in kind.__subclasses__():
        found |= records(own)
    return found


@pytest.fixture(scope="module")
def described() -> None:
    json_schema(Manifest)  # one gives the fields of all records their descriptions


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("kind", sorted(records(Record) - {Record}, key=lambda kind: kind.__name__))
def test_every_field_says_what_it_is(kind: type[Record]) -> None:
    assert kind.model_json_schema(mode="serialization")
    assert kind.__doc__
    for name, field in kind.model_fields.items():
        assert field.description, f"{kind.__name__}.{name}"
        assert field.description.rstrip()[-1] in ".;:", f"{kind.__name__}.{name}"


def test_the_names_are_listed() -> None:
    lines = printed().splitlines()
    assert [line.split()[0] for line in lines] == [
        *RECORDS, *TABLES, *tables_of_questions(), *TRAINING_TABLES, *ARMS_TABLES, "atlas"
    ]  # fmt: skip
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_s_schema_names_every_field(name: str) -> None:
    schema = json.loads(printed(name))
    options = set(declared_options()) if name == "request" else set()
    assert set(schema["properties"]) == options | {
        field.alias or key for key, field in RECORDS[name][0].model_fields.items()
    }  # fmt: skip


def test_the_tables_have_the_columns_of_their_schema(
    tiny_folder: Path, scan_cli: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "EVERY", 16)  # the sequences are long enough for stretches.parquet
    outcome = scan_cli(tiny_folder, "--data", "prose", "--data", "code", "--measure", "all")
    run = load_run(outcome.folder)
    tables: dict[str, Any] = run.tables()
    assert set(tables) == {*TABLES, *tables_of_questions()}
    for name, table in tables.items():
        described = json.loads(printed(name))["columns"]
        assert [column["name"] for column in described] == list(table.columns), name
        kinds = {column["name"]: column["type"] for column in described}
        for column, dtype in table.dtypes.items():
            family = {"i": "integer", "u": "integer", "f": "number", "b": "boolean"}.get(dtype.kind, "string")
            assert kinds[str(column)] == family or kinds[str(column)] == "number", (name, column, dtype)
        assert all(column["what"] for column in described)


def test_the_files_are_as_their_schema_says(tiny_folder: Path, scan_cli: Scan) -> None:
    """A record refuses unknown fields and lacks none, so that reading a file again proves it."""
    run = load_run(scan_cli(tiny_folder).folder)
    for kind, data in ((RECORDS["manifest"][0], run.manifest), (RECORDS["summary"][0], run.summary)):
        assert kind.model_validate(data.as_dict()) == data
    RECORDS["baseline"][0].model_validate(json.loads(baseline_text(baseline_of(run))))


def test_an_unknown_name_is_refused() -> None:
    result = CliRunner().invoke(app, ["schema", "haeds"])
    assert result.exit_code == 2
    assert "no file or table 'haeds'" in result.stderr
