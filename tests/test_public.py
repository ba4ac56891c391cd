"""The public names: `__all__`, `dir`, type checkers and `help(sinkscope)` all agree with one table."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from desk import scanned

import sinkscope
from sinkscope.comparison.baseline import baseline_text


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(sinkscope.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        name.asname: (node.module, name.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == {name: (f"sinkscope.{module}", name) for name, (module, _) in sinkscope._PUBLIC.items()}


@pytest.mark.parametrize("name", sinkscope._PUBLIC)
def test_a_public_name_is_there_and_told_of(name: str) -> None:
    module, what = sinkscope._PUBLIC[name]
    value = getattr(sinkscope, name)
    assert value is getattr(import_module(f"sinkscope.{module}"), name)
    assert value.__doc__
    assert value.__module__ == f"sinkscope.{module}", "the table names where it stands, not where it is passed on"
    assert f"    {name:15} {what}\n" in sinkscope.__doc__


def test_all_and_dir_are_the_table() -> None:
    assert set(sinkscope.__all__) == {"__version__", *sinkscope._PUBLIC}
    assert dir(sinkscope) == sorted(sinkscope.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        sinkscope.nonesuch  # noqa: B018


def test_the_gate_in_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The lines of the package's docstring, as a reader would copy them."""
    monkeypatch.chdir(tmp_path)
    assert sinkscope.__doc__ is not None
    lines = [line.strip() for line in sinkscope.__doc__.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("verdict ="))
    example = "\n".join(lines[start : start + 3])
    Path("sinks.json").write_text(baseline_text(sinkscope.baseline_of(scanned())), encoding="utf-8")
    scanned().save("runs/new")
    exec(example, {"sinkscope": sinkscope})
    assert capsys.readouterr().out == ""
    scanned("zero head").save("runs/new", force=True)
    with pytest.raises(SystemExit, match="1"):
        exec(example, {"sinkscope": sinkscope})
    assert "residual_write_ln layer 1 head 0" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["", "sys.modules['sinkscope.comparison.compare_runs'] = None"], ids=["", "fails"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", (True, False), marks=pytest.mark.slow, id="as Python starts"),
        pytest.param("gc.disable()", (False, False), marks=pytest.mark.slow, id="switched off by the user"),
        pytest.param("gc.freeze()", (True, True), id="frozen by the user"),
    ],
)
def test_an_import_leaves_the_garbage_collector_as_it_finds_it(
    before: str, after: tuple[bool, bool], missing: str
) -> None:
    code = f"""
import contextlib, gc, sys, sinkscope
{before}
{missing}
with contextlib.suppress(ImportError):
    sinkscope.compare
print(gc.isenabled(), gc.get_freeze_count() > 0, "compare" in vars(sinkscope))
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed == f"{after[0]} {after[1]} {not missing}\n"
