"""A question of another package that does not load, or declares what no question can have, is left out and named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaged import package

from sinkscope.errors import SinkscopeError
from sinkscope.metrics.extension import with_own_metrics
from sinkscope.runs.questions import QUESTIONS, Option, Question, questions_asked
from sinkscope.runs.request import Request
from sinkscope.runs.schema.table import LAYER, TableSchema

SOUND = Question("mine", "what?", "json", (TableSchema("mine", "mine.csv", "a row", (LAYER,)),))
ANY: Any = None
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package named `a_package`, whose module has this text, with one question: (name, text)."""
    module = f"questions_{tmp_path.name.replace('-', '_')}"

    def declare(name: str, text: str) -> None:
        entry = {name: f"{module}:QUESTION"}
        package(tmp_path / "site", "a_package", "sinkscope.questions", entry, **{module: text})
        monkeypatch.syspath_prepend(tmp_path / "site")

    return declare


def test_one_that_does_not_load_is_left_out(install: Install) -> None:
    install("mine", "1 / 0")
    said = r"^--measure mine: a_package does not load: division by zero"
    with pytest.warns(UserWarning, match=f"{said}; it is left out$"):
        assert "mine" not in [*QUESTIONS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [*QUESTIONS]  # it warns once
    with pytest.raises(SinkscopeError, match=f"{said}$"):
        questions_asked(["mine"])
    with pytest.raises(SinkscopeError, match=f"{said}$"):
        Request(model="m", measures=["mine"])


def test_one_that_takes_a_name_of_sinkscopes_is_no_reason_to_leave_that_out(install: Install) -> None:
    install("streaming", "QUESTION = None")
    with pytest.raises(SinkscopeError, match=r"^--measure streaming: declared by sinkscope and by a_package; keep one"):
        list(QUESTIONS)


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({"asks": None}, "whose asks is a text"), ({"place": "x"}, "whose place is a whole number"),
        ({"tables": SOUND.tables[0]}, "whose tables are a tuple of TableSchema"),
        ({"figures": "steady"}, "whose figures are a tuple of str"),
        ({"options": ("bar",)}, "whose options are a tuple of Option"),
        ({"options": (Option("bar", ANY, ""),)}, "defaults that are a whole number"),
        ({"options": (Option("b.ar", 1, ""),)}, "of plain names: 'b.ar' is none"),
        ({"options": (Option("lambda", 1, ""),)}, "of plain names: 'lambda' is none"),
        ({"options": (Option("window", 1, ""),)}, "with names of its own: sinkscope has window"),
        ({"tables": (replace(SOUND.tables[0], name="heads"),)}, "with names of its own: sinkscope has heads"),
        ({"tables": (replace(SOUND.tables[0], name="switch"),)}, "with names of its own: sinkscope has switch"),
        ({"tables": (replace(SOUND.tables[0], name="../x"),)}, "of plain names: '../x' is none"),
        ({"figures": ("heatmap",)}, "with names of its own: sinkscope has heatmap"),
        ({"figures": ("steady", "switch")}, "with names of its own: sinkscope has switch"),
        ({"name": "m ine"}, "of plain names: 'm ine' is none"), ({"name": "all"}, "of plain names: 'all' is none"),
    ],
)  # fmt: skip
def test_what_no_question_can_have_is_refused(change: dict[str, Any], needed: str) -> None:
    changed = replace(SOUND, **change)
    assert needed in str(QUESTIONS._lacks(changed.name, changed))


def test_a_sound_one_is_taken() -> None:
    assert QUESTIONS._lacks("mine", replace(SOUND, options=(Option("bar", 0.5, "What it is."),))) is None


def test_a_saved_request_of_a_question_that_is_absent_says_so() -> None:
    with pytest.raises(SinkscopeError, match=r"^--measure 'absent': .* or install the package that brings it$"):
        Request(model="m", measures=["absent"], bar=0.3)


def test_an_option_of_every_scan_is_none_of_a_question() -> None:
    QUESTIONS.add("mine", replace(SOUND, options=(Option("seed", 1, ""),)), "a_package")
    try:
        with pytest.raises(SinkscopeError, match=r"^--measure mine: its option seed is one of every scan: rename it$"):
            Request(model="m")
    finally:
        QUESTIONS.remove("mine")


def test_a_column_of_a_question_does_not_take_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """sequences.parquet holds the columns of all tables together: the later one stood there for both."""
    from sinkscope.metrics.registry import measured_metric

    @measured_metric("mine", unit="ratio", range="[0, 1]")
    def bos_mass(view: Any) -> Any:
        """Something else."""

    columns = SimpleNamespace(bos_mass=bos_mass)
    part = Question.part
    monkeypatch.setattr(Question, "part", lambda self, name: columns if self is SOUND else part(self, name))
    QUESTIONS.add("mine", SOUND, "a_package")
    try:
        with pytest.raises(SinkscopeError, match=r"^metric bos_mass of --measure mine: the column name bos_mass is"):
            with_own_metrics([])
    finally:
        QUESTIONS.remove("mine")
