"""data/columns.json agrees with the declarations, and contains every column of every table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sinkscope.metrics import registered
from sinkscope.runs.catalogue import catalogue, find_column, per_sequence
from sinkscope.runs.run import load_run
from sinkscope.runs.schema.manifest import MetricFacts
from sinkscope.tables import write_catalogue
from sinkscope.tables.columns import columns
from sinkscope.tables.write_catalogue import catalogue_texts


@pytest.mark.parametrize("file", catalogue_texts(), ids=lambda file: file.parent.name)
def test_the_catalogue_is_what_the_declarations_say(file: Path) -> None:
    assert file.read_text("utf-8") == catalogue_texts()[file], "run: python -m sinkscope.tables.write_catalogue"


def test_the_command_writes_the_catalogue_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[Path, str] = {}
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding: written.update({path: text}))
    runpy.run_path(str(write_catalogue.__file__), run_name="__main__")
    assert written == catalogue_texts()
    assert {path.parent.name for path in written} >= {"data", "smoothing", "switch", "cosines"}


def test_the_columns_of_a_table_are_all_there_whoever_asks() -> None:
    assert {"peak_position", "peak_score", "pattern", "dormant"} <= set(columns("heads"))
    assert {"first_constancy", "max_abs", "sink_heads", "dormant_heads"} <= set(columns("layers"))
    assert list(columns("smoothing"))[-10:-5] == ["verdict", "rank_w", "rank_qk", "cost_actual", "cheaper"]
    assert list(columns("smoothing"))[-5:-2] == ["cost_qk", "cheaper_qk", "cheaper_block"]
    assert list(columns("smoothing"))[-2:] == ["spread_path", "cheaper_groups"]
    for table in registered().tables:
        assert {column.name for column in catalogue() if column.table == table} == set(columns(table))


def test_a_run_adds_its_own_columns() -> None:
    plain = load_run(Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos").manifest
    mine = MetricFacts(table="heads", unit="nats", range="[0, 1]", formula="F.", source="S", code_sha256="0")
    found = find_column(plain.model_copy(update={"metrics": {"mine": mine}}), "mine", "heads")
    assert found is not None
    assert (found.unit, found.per) == ("nats", "sequence")
    assert find_column(plain, "mine", "heads") is None
    assert find_column(plain, "norm_first", "heads") is None
    assert find_column(plain, "norm_first", "heads", "layers").unit == "norm"  # type: ignore[union-attr]


def test_what_has_a_value_for_each_sequence() -> None:
    assert "bos_mass" in per_sequence("heads")
    assert not {"dormant", "peak_score", "norm_first"} & per_sequence("heads")
    assert not {"max_abs", "max_abs_token"} & per_sequence("layers")
