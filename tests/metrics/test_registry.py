"""A user's own metrics: which are accepted, which are refused in one line, and what a scan records of them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Refused
from models import random_ids, tiny
from packaged import package
from typer.testing import CliRunner

import sinkscope
from sinkscope import LayerView, SinkscopeError, head_metric, layer_metric
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.cli import app
from sinkscope.engine.launch import Processes
from sinkscope.metrics import METRICS, registered
from sinkscope.metrics.extension import code_sha256, definitions, functions_in, refuse_left_out
from sinkscope.metrics.registry import formula_of, measured_metric, register
from sinkscope.tables.columns import metric_set


def shown() -> LayerView:
    """A view of 2 sequences, 4 heads, 8 queries, of which only A[i,0] is known."""
    attention, view = object.__new__(AttentionSums), object.__new__(LayerView)
    attention.first = torch.ones(2, 4, 8)
    view.attention = attention
    return view


HEAD = "from sinkscope import head_metric\n\n@head_metric(unit='ratio', range='[0, 1]')\n"
GOOD = HEAD + "def own(view):\n    'Half of what is given to key 0.'\n    return view.attention.first.mean(-1) / 2\n"


def declared_as(name: str, compute: Callable[..., Any] = lambda view: view.attention.first[..., 0]) -> Any:
    """`compute` as a head metric of that name."""

    def copy(view: LayerView) -> Any:
        return compute(view)

    copy.__name__, copy.__doc__ = name, "Something of a head."
    return head_metric(unit="ratio", range="[0, 1]")(copy)


def written(folder: Path, text: str, name: str = "own.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_map_offers_the_normalised_form_of_a_metric_that_has_one() -> None:
    """A manifest does not record the place: the map offers every metric that is not sinkscope's own."""

    def own(view: LayerView) -> Any:
        """Something of a head."""
        return view.attention.first[..., 0]

    for normalised, places in ((False, {"own": 2}), (True, {"own": None, "own_ln": 2})):
        metric = head_metric(unit="ratio", range="[0, 1]", normalised=normalised, map_place=2)(own)
        metrics = metric_set([metric])
        assert {name: metrics.tables["heads"][name].map_place for name in places} == places
        assert not any("map_place" in facts for facts in definitions(metrics).values())


def test_a_decorator_registers_nothing_and_a_file_may_be_read_twice(tmp_path: Path) -> None:
    before = registered()
    path = written(tmp_path, GOOD + "\nfrom sinkscope.metrics.mass import bos_mass\n")
    functions_in(path)
    metrics = metric_set([path, path, functions_in(path)[-1]])
    assert registered() == before
    assert metrics.names("heads") == (*before.names("heads"), "own")
    assert list(METRICS["heads"]) == list(before.names("heads"))


def test_what_a_scan_has_taken_never_changes() -> None:
    own = declared_as("own")
    first = metric_set([own])
    metric_set([own, declared_as("later")])
    assert "later" not in first.names("heads")
    assert "own" not in registered().names("heads")


def test_a_normalised_metric_brings_its_second_column() -> None:
    @head_metric(unit="ratio", range="[0, 1]", normalised=True)
    def own(view: LayerView) -> Any:
        """What query 0 gives."""
        return view.attention.first[..., 0]

    metrics = metric_set([own])
    assert metrics.names("heads")[-2:] == ("own", "own_ln")
    assert set(definitions(metrics)) == {"own", "own_ln"}
    assert {each["code_sha256"] for each in definitions(metrics).values()} == {code_sha256(own)}


@pytest.mark.parametrize(
    "name", ["bos_mass", "inf_norm", "beta", "max_abs", "verdict", "head", "bos_mass_sem", "mean_bos_mass", "awft_ln"]
)
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(SinkscopeError, match=f"^metric {name}: the column name {name} is taken"):
        metric_set([declared_as(name)])


def test_of_two_metrics_of_one_name_the_second_is_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"^metric own: the column name own is taken"):
        metric_set([declared_as("own"), declared_as("own")])
    with pytest.raises(SinkscopeError, match="the column name own_sem is taken"):
        metric_set([declared_as("own"), declared_as("own_sem")])


@pytest.mark.parametrize(
    "given", [print, 3, lambda view: view, LayerView, []], ids=["built-in", "number", "function", "class", "list"]
)
def test_what_is_no_metric_is_refused(given: Any) -> None:
    with pytest.raises(SinkscopeError, match=r"is no metric: put @sinkscope\.head_metric"):
        metric_set([given])


def test_a_metric_without_a_docstring_is_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"^metric bare has no docstring"):

        @layer_metric(unit="ratio", range="[0, 1]")
        def bare(view: LayerView) -> Any:
            return view.x_norms[:, 0]


@pytest.mark.parametrize("given", [{"unit": 3}, {"range": None}, {"source": b"x"}])
def test_a_metric_whose_unit_is_no_text_is_refused(given: dict[str, Any]) -> None:
    def own(view: LayerView) -> torch.Tensor:
        """What it is."""
        return view.x_norms

    if hasattr(head_metric, "__wrapped__"):
        pytest.skip("types are checked before, where shapes are")
    told = f"^metric own: its {next(iter(given))} is .*; a text is needed$"
    with pytest.raises(SinkscopeError, match=told):
        head_metric(**{"unit": "share", "range": "[0, 1]"} | given)(own)


def test_python_without_docstrings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under -OO every metric lacks its docstring, and none of them is to blame."""
    flags = SimpleNamespace(flags=SimpleNamespace(optimize=2))
    monkeypatch.setattr("sinkscope.metrics.registry.sys", flags)
    with pytest.raises(SinkscopeError, match=r"Python left out the docstrings.*start it without -OO"):
        formula_of(lambda view: view)


def test_a_family_that_declares_a_name_of_another_is_refused() -> None:
    family = ModuleType("twice")
    family.bos_mass = declared_as("bos_mass")  # type: ignore[attr-defined]
    before = registered()
    with pytest.raises(SinkscopeError, match=r"^metric bos_mass: twice declares it a second time"):
        register(family)
    assert registered() == before


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as before and of the same second: Python's own cache of compiled files takes it for the old one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = written(tmp_path, GOOD)
    [before] = functions_in(path)
    stamp = path.stat()
    written(tmp_path, GOOD.replace("/ 2", "/ 4"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    [after] = functions_in(path)
    assert float(before(shown())[0, 0]) == 0.5
    assert float(after(shown())[0, 0]) == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("x = 1\n", "the file declares no metric; put @sinkscope.head_metric above a function"),
        ("def own(:\n", r"SyntaxError: .*own.py, line 1"),
        ("import sys\n\nsys.exit(1)\n", r"SystemExit: 1 \(line 3 of own.py\)"),
        ("import nonesuch\n", r"ModuleNotFoundError: No module named 'nonesuch' \(line 1 of own.py\)"),
        (HEAD + "def own(view):\n    return view.attention.first[..., 0]\n", "metric own has no docstring"),
    ],
)
def test_files_that_hold_no_metric(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        written(tmp_path, text)
    with pytest.raises(SinkscopeError, match=message) as caught:
        functions_in(path)
    assert str(path) in str(caught.value)


def test_the_command_line_says_so_in_one_line(tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    taken = written(tmp_path, GOOD.replace("own", "entropy"), "taken.py")
    assert refused(tiny_folder, "--metrics", taken).startswith("metric entropy: the column name entropy is taken")
    assert refused(tiny_folder, "--metrics", tmp_path / "own.txt").endswith("a Python file (.py) is needed")


PACKAGE = """
import sys

from sinkscope import head_metric, layer_metric

print("loading")

@head_metric(unit="ratio", range="[0, 1]")
def theirs(view):
    "What query 0 gives."
    return view.attention.first[..., 0]

@layer_metric(unit="ratio", range="[0, 1]")
def theirs_of_a_layer(view):
    "What query 0 gives, over the heads."
    return view.attention.first[..., 0].mean(-1)

nothing = "no metric"
"""


def install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, place: str, text: str = PACKAGE) -> None:
    """A distribution of this name with a module of this name, which brings the metrics at `place`."""
    package(folder, name, "sinkscope.metrics", {"x": place}, **{name: text})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("entry", "names"), [("outside:theirs", ["theirs"]), ("outside", ["theirs", "theirs_of_a_layer"])]
)
def test_an_installed_package_brings_metrics(
    entry: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "outside", monkeypatch, entry)
    found = metric_set()
    assert [*found.names("heads")[-1:], *found.names("layers")[-1:]][: len(names)] == names
    assert capsys.readouterr() == ("", "loading\n")
    with pytest.raises(SinkscopeError, match=r"^metric theirs: the column name theirs is taken"):
        metric_set([declared_as("theirs")])
    shown = CliRunner().invoke(app, ["metrics", names[-1], "--json"])
    assert [column["name"] for column in json.loads(shown.stdout)] == names[-1:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "the metrics x: outside does not load: division by zero"),
        ("raise ValueError", "the metrics x: outside does not load: it gives no reason"),
        ("import sys; sys.exit(0)", "the metrics x: outside does not load: 0"),
        ("", "the metrics x: outside's outside is not a metric, and holds none"),
    ],
)
def test_an_installed_package_that_brings_none_is_named_and_left_out(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended every scan, though nobody had asked for its metrics."""
    before = metric_set()
    install(tmp_path, "outside", monkeypatch, "outside", text)
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}; it is left out$"):
        found = metric_set()
    for table in ("heads", "layers"):
        assert found.names(table) == before.names(table)
    assert metric_set().names("heads") == before.names("heads"), "told once"
    with pytest.raises(SinkscopeError, match=f"^--strict: {re.escape(message)}$"):
        refuse_left_out()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PACKAGE.replace("theirs(", "bos_mass("), "metric bos_mass: the column name bos_mass is taken"),
        (
            PACKAGE.replace("@layer", "kept = theirs\n\n@layer").replace("theirs_of_a_layer", "theirs"),
            "metric theirs: the column name theirs is taken",
        ),
    ],
)
def test_a_package_whose_names_are_taken_is_left_out(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = metric_set()
    install(tmp_path, "outside", monkeypatch, "outside", text)
    told = f"^the metrics x of outside: {message}; give the function another name; they are left out$"
    with pytest.warns(UserWarning, match=told):
        found = metric_set([declared_as("mine")])
    assert found.names("heads") == (*before.names("heads"), "mine")
    assert found.names("layers") == before.names("layers")


@pytest.mark.parametrize("entry", ["nothing", "theirs.__name__", "nothing.upper"])
def test_what_an_installed_package_gives_for_a_metric_may_be_anything(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text, a number or a builtin has no __dict__ to look for metrics in."""
    install(tmp_path, "outside", monkeypatch, f"outside:{entry}")
    with pytest.warns(UserWarning, match=r"^the metrics x: outside's .* is not a metric, and holds none; it is left"):
        metric_set()


def test_two_packages_with_one_name_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "first_one", monkeypatch, "first_one:theirs")
    install(tmp_path, "second_one", monkeypatch, "second_one:theirs")
    with pytest.warns(UserWarning, match=r"^the metrics x: declared by (first|second)_one and by .*; keep one"):
        metric_set()


def test_a_name_that_is_no_column_is_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"^metric 'a,b': no name for a column"):
        metric_set([declared_as("a,b")])


def test_a_table_of_a_question_takes_no_column_of_others() -> None:
    @measured_metric("nonesuch", unit="ratio", range="[0, 1]")
    def own(view: LayerView) -> Any:
        """Something."""

    with pytest.raises(SinkscopeError, match=r"^metric own: only a question adds columns to nonesuch"):
        metric_set([own])


def test_a_dormant_rule_may_name_a_metric_of_ones_own(tmp_path: Path) -> None:
    model, ids = tiny("llama", num_hidden_layers=1), random_ids(2, 16)
    with pytest.raises(SinkscopeError, match="'own' is no per-sequence column"):
        sinkscope.scan(model, data=ids, self_check=False, dormant_rule="own<2")
    run = sinkscope.scan(model, data=ids, self_check=False, dormant_rule="own<2", metrics=[written(tmp_path, GOOD)])
    assert run.heads["dormant"].all()


@pytest.mark.slow
def test_the_code_is_part_of_what_a_scan_goes_on_by(tmp_path: Path) -> None:
    path, out = written(tmp_path, GOOD), tmp_path / "run"
    model, ids = tiny("llama", num_hidden_layers=1), random_ids(3, 16)

    def scan(resume: bool, break_off: bool = False) -> sinkscope.Run:
        def progress(stage: str, done: int, total: int) -> None:
            if break_off and done:
                raise KeyboardInterrupt

        return sinkscope.scan(
            model, data=ids, self_check=False, metrics=[path], batch_size=1, shards=out, resume=resume,
            progress=progress,
        )  # fmt: skip

    with pytest.raises(sinkscope.Interrupted):
        scan(resume=False, break_off=True)
    written(tmp_path, GOOD.replace("/ 2", "/ 3"))
    with pytest.raises(SinkscopeError, match=r"another metrics\.own\.code_sha256"):
        scan(resume=True)
    written(tmp_path, GOOD)
    run = scan(resume=True)
    assert (run.heads["own"] - run.heads["sink_score"] / 2).abs().max() < 1e-7


def test_processes_of_a_launch_must_have_the_same_code(tmp_path: Path) -> None:
    told = []

    class Listening(Processes):
        def require_same(self, facts: Any) -> None:
            told.append(facts)

    model, ids = tiny("llama", num_hidden_layers=1), random_ids(2, 16)
    for text in (GOOD, GOOD, GOOD.replace("/ 2", "/ 3")):
        path = written(tmp_path, text)
        sinkscope.scan(model, data=ids, self_check=False, metrics=[path], processes=Listening())
    assert told[0] == told[1] != told[2]
