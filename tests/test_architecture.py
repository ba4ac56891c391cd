"""docs/architecture.md held to the code: its walks are what the commands call. No page names a path that is gone."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import SHORT
from house import NEIGHBOURS, ROOMS
from typer.testing import CliRunner

from sinkscope.cli import app

ROOT = Path(__file__).parents[1]
HOME = ROOT / "sinkscope"
PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text("utf-8")
CELL, OUT, BACK, REPORT = "From q, k and v", "Out: ", "Back: ", "From a saved run"

Step = tuple[str, str]
"""(file, function) as the page names them."""


def walk(title: str) -> list[Step]:
    """The steps of the numbered list under the heading that begins so."""
    (section,) = re.findall(rf"^#+ {re.escape(title)}.*?(?=^#|\Z)", TEXT, re.M | re.S)
    return re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)`", section, re.M)


def defined(path: Path) -> Iterator[str]:
    """Names of a module's functions, and of its classes' as CLASS.NAME."""
    for node in ast.parse(path.read_text("utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        yield from (prefix + each.name for each in inner if isinstance(each, ast.FunctionDef))


@contextmanager
def calls_of(steps: list[Step]) -> Iterator[list[Step]]:
    """The calls of these functions while the block runs, in their order, from the first call of the first step on."""
    made: list[Step] = []
    known = {(str(HOME / file), function): (file, function) for file, function in steps}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        step = known.get((frame.f_code.co_filename, frame.f_code.co_qualname)) if event == "call" else None
        if step is not None and (made or step == steps[0]):
            made.append(step)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield made
    finally:
        sys.setprofile(before)


SPINE = ("cli/scan.py", "cli/scan_job.py", *(f"engine/{name}.py" for name in ("launch", "scan", "loaded", "prepared")))
SPINE += ("engine/finished.py",)
"""The files that decide in which order a scan takes its steps."""


@contextmanager
def steps_of(files: tuple[str, ...]) -> Iterator[list[str]]:
    """The files below sinkscope/ that calls from these files lead to, each call once, in the order of the first."""
    made: dict[tuple[object, object], str] = {}

    def place(frame: FrameType) -> str:
        name = frame.f_code.co_filename
        inside = name.removeprefix(f"{HOME}/")
        return inside if inside != name and "/" in inside else ""  # not the package's own __init__.py

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not place(frame) or frame.f_code.co_name in ("<module>", "<listcomp>", "<genexpr>"):
            return
        caller = frame.f_back
        while caller is not None and not place(caller):
            caller = caller.f_back
        if caller is not None and place(caller) in files and caller.f_code.co_name != "<module>":
            made.setdefault((caller.f_code, frame.f_code), place(frame))

    found: list[str] = []
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(before)
    found += made.values()


LEVEL = {
    room: next((min(map(ROOMS.index, pair)) for pair in NEIGHBOURS if room in pair), at)
    for at, room in enumerate(ROOMS)
}
"""Where a room stands in the order, counted from the top; rooms that stand beside each other share a number."""


def turns(files: list[str]) -> tuple[int, int]:
    """Of a walk: the steps up to a room above that of the step before, and the steps back to a file that was left."""
    levels_of = [LEVEL[file.partition("/")[0]] for file in files]
    climbs = sum(after < before for before, after in pairwise(levels_of))
    returns = sum(file != before and file in files[:at] for at, (before, file) in enumerate(pairwise(files), 1))
    return climbs, returns


def test_what_counts_as_a_turn() -> None:
    walked = ["cli/scan.py", "engine/scan.py", "engine/launch.py", "engine/scan.py", "cli/scan.py", "cli/scan.py"]
    assert turns(walked) == (1, 2)


@pytest.mark.slow
def test_who_reads_a_scan_rarely_turns_back(tiny_folder: Path, tmp_path: Path) -> None:
    """sinkscope 0.2.0 was written with 21 climbs and 35 returns, most of them for steps that a lambda wraps."""
    assert [file for file in SPINE if not (HOME / file).is_file()] == []
    with steps_of(SPINE) as files:
        sinkscope("scan", tiny_folder, *SHORT, "--quiet", "--out", tmp_path / "run")
    climbs, returns = turns(["cli/scan.py", *files])
    assert {"engine/prepared.py", "engine/loop.py", "runs/run.py"} <= set(files)
    assert climbs <= 10
    assert returns <= 15


def sinkscope(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr


@pytest.fixture(scope="module")
def saved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "run"
    sinkscope("scan", tiny_folder, *SHORT, "--quiet", "--out", folder)
    return folder


@pytest.mark.parametrize("title", [CELL, OUT, BACK, REPORT])
def test_every_step_exists(title: str) -> None:
    steps = walk(title)
    assert len(steps) >= 4
    assert [(file, function) for file, function in steps if function not in defined(HOME / file)] == []


@pytest.mark.parametrize("title", [OUT, BACK, REPORT])
def test_no_file_stands_twice_in_a_walk(title: str) -> None:
    files = [file for file, _ in walk(title)]
    assert len(set(files)) == len(files)


@pytest.mark.slow
def test_from_q_k_and_v_to_a_cell(tiny_folder: Path, tmp_path: Path) -> None:
    """Steps repeat for every layer and batch: the first calls are in the page's order."""
    with calls_of(walk(CELL)) as made:
        sinkscope("scan", tiny_folder, *SHORT, "--quiet", "--out", tmp_path / "run")
    assert list(dict.fromkeys(made)) == walk(CELL)


@pytest.mark.slow
def test_from_a_command_line_to_the_request(tiny_folder: Path, tmp_path: Path) -> None:
    with calls_of(walk(OUT)) as made:
        sinkscope("scan", tiny_folder, *SHORT, "--quiet", "--out", tmp_path / "run")
    assert made == walk(OUT)


def test_back_from_a_manifest(tiny_folder: Path, saved: Path) -> None:
    with calls_of(walk(BACK)) as made:
        sinkscope("check", tiny_folder, "--baseline", saved, "--quiet")
    assert entered(made)[: len(walk(BACK))] == walk(BACK)  # then the gate makes a baseline of the new run


def test_from_a_saved_run_to_the_report(saved: Path, tmp_path: Path) -> None:
    with calls_of(walk(REPORT)) as made:
        sinkscope("report", saved, "-o", tmp_path / "page.html")
    assert entered(made) == walk(REPORT)


def entered(calls: list[Step]) -> list[Step]:
    """Calls of one function that follow each other count once: one record is read, then the next."""
    return [step for step, _ in groupby(calls)]


def test_the_rooms_and_the_law_are_those_of_the_code() -> None:
    assert re.findall(r"^- \*\*(\w+)\*\*:", TEXT, re.M) == list(ROOMS)
    (law,) = re.findall(r"stand below it:\n\n((?: {4}.+\n)+)", TEXT)
    assert re.findall(r"\w+", law) == list(ROOMS)


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
LINK = r"\]\(([^)#:]+)(?:#[^)]*)?\)"
PATH = r"(?<![\w/.])((?:tests|sinkscope|examples|docs|\.ci)/[\w./-]*\w)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    named = [page.parent / link for link in re.findall(LINK, text)] + [ROOT / path for path in re.findall(PATH, text)]
    assert [str(path) for path in named if not path.exists() and "NAME" not in path.name] == []
    assert named or page.name in ("trigger.md", "SECURITY.md"), "the expressions find what a page names"
