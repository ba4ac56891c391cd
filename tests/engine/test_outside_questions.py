"""A question of another package that fails is one line, which names the question and the package, at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from models import random_ids, tiny

import sinkscope
from sinkscope.capture.view import Missing
from sinkscope.engine.measurement import Measurement, measurements
from sinkscope.engine.outside import guarded
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import Quantity, table_by_head
from sinkscope.metrics.registry import MetricSet, measured_metric
from sinkscope.present.html.section import sections
from sinkscope.runs.questions import QUESTIONS, Question
from sinkscope.runs.schema.table import LAYER, TableSchema

FAILS = r"^--measure faulty: a_package fails: "
ANY: Any = None


@pytest.fixture
def question() -> Iterator[Question]:
    made = Question("faulty", "does it fail?", "json", (TableSchema("faulty", "faulty.csv", "a row", (LAYER,)),))
    QUESTIONS.add("faulty", made, "a_package")
    yield made
    QUESTIONS.remove("faulty")


def fail(*given: object) -> Any:
    raise KeyError("nokey")


def measuring(question: Question, **steps: Callable[..., Any]) -> Any:
    """A measurement with these steps, as a scan gets it, made for no model."""
    return guarded(type("Faulty", (Measurement,), steps), question)(ANY)


@pytest.mark.parametrize(
    ("step", "given"),
    [("of_call", 1), ("again", 1), ("left_out", 1), ("quantities", 0), ("parts", 0), ("tables", 1), ("summarise", 2)],
)
def test_a_step_that_fails_is_named(step: str, given: int, question: Question) -> None:
    measurement = measuring(question, **{step: fail})
    with pytest.raises(SinkscopeError, match=f"{FAILS}'nokey' is missing$"):
        getattr(measurement, step)(*[ANY] * given)


def test_a_measurement_that_cannot_be_made_is_named(question: Question) -> None:
    with pytest.raises(SinkscopeError, match=f"{FAILS}'nokey' is missing$"):
        measuring(question, __init__=fail)


@pytest.mark.parametrize("late", [False, True])
def test_watching_that_fails_is_named_and_an_error_of_the_pass_is_not(late: bool, question: Question) -> None:
    @contextmanager
    def watching(self: object, batch: object, ids: object) -> Iterator[None]:
        if late:
            yield
        fail()

    measurement = measuring(question, watching=watching)
    with pytest.raises(SinkscopeError, match=FAILS), measurement.watching(ANY, ANY):
        pass
    if late:
        with pytest.raises(ZeroDivisionError), measurement.watching(ANY, ANY):
            raise ZeroDivisionError


@pytest.mark.parametrize("error", [Missing(), MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate")])
def test_what_is_not_the_questions_fault_passes(error: Exception, question: Question) -> None:
    def compute(view: torch.Tensor) -> torch.Tensor:
        raise error

    (quantity,) = measuring(
        question, quantities=lambda self: (Quantity("faulty", ("sequence",), compute),)
    ).quantities()
    with pytest.raises(type(error)):
        quantity.compute(torch.zeros(2))


def test_a_quantity_cannot_change_what_others_read(question: Question) -> None:
    made = Quantity("faulty", ("sequence",), lambda view: view.zero_())
    (quantity,) = measuring(question, quantities=lambda self: [made]).quantities()
    view = torch.ones(2)
    with pytest.raises(SinkscopeError, match=f"{FAILS}it writes into what it was shown"):
        quantity.compute(view)
    assert view.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (torch.zeros(3), r"tensor \[3\] of torch.float32"), (torch.zeros(3, 3, dtype=torch.cfloat), "torch.complex64"),
        (None, "NoneType"),
    ],
)  # fmt: skip
def test_a_column_of_another_shape_or_type_is_refused(values: Any, told: str) -> None:
    """A tensor [head] of a batch of as many sequences as heads was spread over the sequences."""

    @measured_metric("faulty", unit="ratio", range="[0, 1]")
    def mine(view: Any) -> Any:
        """What it is."""
        return values

    (metric,) = mine.sinkscope_metrics  # type: ignore[attr-defined]
    quantity = table_by_head("faulty", MetricSet({"faulty": {"mine": metric}}))
    view = type("View", (), {"attention": type("Sums", (), {"first": torch.zeros(3, 3, 5)})})
    with pytest.raises(TypeError, match=rf"^mine returned .*{told}; real numbers \[3, 3\] are needed"):
        quantity.compute(view)


@pytest.mark.parametrize(
    ("step", "given", "value", "told"),
    [
        ("tables", 1, None, "no DataFrames"), ("tables", 1, {"faulty": {"a": [1]}}, "no DataFrames"),
        ("tables", 1, {"heads": pd.DataFrame()}, "returns heads, and the question declares faulty"),
        ("parts", 0, {"a": 3}, "no lists of Part"), ("parts", 0, None, "no lists of Part"),
    ],
)  # fmt: skip
def test_what_a_step_returns_is_checked(step: str, given: int, value: Any, told: str, question: Question) -> None:
    measurement = measuring(question, **{step: lambda *given: value})
    with pytest.raises(SinkscopeError, match=f"{FAILS}.*{told}"):
        getattr(measurement, step)(*[ANY] * given)


def test_a_folder_without_a_measurement_is_named(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Question, "part", lambda self, name: type("measure", (), {"MEASUREMENT": 3}))
    with pytest.raises(SinkscopeError, match=r"^--measure faulty: json\.measure has no MEASUREMENT"):
        measurements(["faulty"])


@pytest.mark.parametrize(("section", "told"), [(fail, "'nokey' is missing"), (lambda *given: "hi", "returns str")])
def test_a_section_that_fails_is_named(
    section: Any, told: str, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = type("section", (), {"section": staticmethod(section)})
    monkeypatch.setattr(Question, "part", lambda self, name: found if self is question else None)
    with pytest.raises(SinkscopeError, match=f"{FAILS}.*{told}"):
        sections(ANY, False)


def test_columns_that_do_not_load_are_no_reason_to_refuse_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "unloadable_question"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "columns.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tables = (TableSchema("unloadable", "unloadable.csv", "a row", (LAYER,)),)
    QUESTIONS.add("unloadable", Question("unloadable", "does it load?", folder.name, tables), "a_package")
    said = r"^--measure unloadable: a_package fails: division by zero"
    try:
        model, ids = tiny("llama", num_hidden_layers=1, layer_types=None), random_ids(2, 20)
        with pytest.warns(UserWarning, match=f"{said}; its columns are left out$"):
            run = sinkscope.scan(model, data=ids, self_check=False)
        assert run.heads["bos_mass"].notna().all()
        with pytest.raises(SinkscopeError, match=f"{said}$"):
            sinkscope.scan(model, data=ids, self_check=False, measure="unloadable")
    finally:
        QUESTIONS.remove("unloadable")
