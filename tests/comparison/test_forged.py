"""Files of a run, a baseline and a policy with one value forged: each is read, or refused in one clear line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from desk import scanned
from tiers import slow_but

from sinkscope import SinkscopeError, load_run
from sinkscope.comparison.baseline import baseline_of, baseline_text, read_baseline
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import DEFAULT, Policy, Rule, read_policy

FORGED: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 0.5, float("nan"), float("inf"),
    "", "text", "\udc80", [], [None], {}, {"": None}, [[[1]]],
)  # fmt: skip
PER_LIST, EVERY = 1, 16
"""Entries of each list that are forged: the others have the same form. And which of FORGED a place gets, in turn."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON data, but only the first of a list's entries."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:PER_LIST]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def forgeries(data: Any) -> Iterator[tuple[str, Any]]:
    """Copies of the data with one place deleted, or with another value."""
    for turn, path in enumerate(places(data)):
        for number in (-1, *((turn + step) % len(FORGED) for step in range(0, len(FORGED), EVERY))):
            forged = copy.deepcopy(data)
            owner = forged
            for key in path[:-1]:
                owner = owner[key]
            if number < 0:
                del owner[path[-1]]
            else:
                owner[path[-1]] = FORGED[number]
            yield f"{path} = {'nothing' if number < 0 else FORGED[number]!r}", forged


def unclear(read: Callable[[Any], object], data: Any) -> list[str]:
    """The forgeries that end in anything but an answer or one line."""
    found = []
    for what, forged in forgeries(data):
        try:
            read(forged)
        except SinkscopeError as error:
            if "\n" in str(error):
                found.append(f"{what}: several lines")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__} {str(error)[:100]}")
    return found


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged") / "run"
    scanned(layers=2).save(folder)
    return folder


@pytest.mark.slow
def test_forged_baselines(run_folder: Path, tmp_path: Path) -> None:
    run = load_run(run_folder)
    data, file = json.loads(baseline_text(baseline_of(run))), tmp_path / "b.json"
    for level in data["levels"]:
        for label in ("mean", "sem"):
            level[label] = {name: values for name, values in level[label].items() if name in ("bos_mass", "norm_first")}
    rule = Rule(metric="bos_mass", level="head", max_change=0.1)

    def judge(forged: Any) -> None:
        file.write_text(json.dumps(forged))
        check(run, read_baseline(file), Policy(rules=[rule]))

    assert unclear(judge, data) == []


@pytest.mark.parametrize("name", slow_but(["manifest.json", "summary.json"], "summary.json"))
def test_forged_runs(name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_folder / name
    whole = file.read_text()
    tables = load_run(run_folder).tables()
    monkeypatch.setattr("sinkscope.runs.run._read_table", lambda folder, name, shape: tables[name])
    monkeypatch.setattr("sinkscope.runs.run._check_content", lambda *_: None)  # the hash gave every summary away

    def read(forged: Any) -> None:
        file.write_text(json.dumps(forged))
        load_run(run_folder)

    try:
        assert unclear(read, json.loads(whole)) == []
    finally:
        file.write_text(whole)


@pytest.mark.parametrize("value", [[{}], [[]], [{"": None}, "switch"]], ids=str)
def test_no_setting_of_a_run_is_a_list_of_tables(value: Any, run_folder: Path) -> None:
    """What cannot be hashed must not be put into a set before its type is asked."""
    file = run_folder / "manifest.json"
    whole = file.read_text()
    data = json.loads(whole)
    try:
        for name in data["request"]:
            file.write_text(json.dumps({**data, "request": {**data["request"], name: value}}))
            with pytest.raises(SinkscopeError, match=r"manifest\.json of the run"):
                load_run(run_folder)
    finally:
        file.write_text(whole)


POLICY = {
    "significance": 0.01,
    "same_precision": 0.1,
    "rules": [{"metric": "bos_mass", "level": "head", "max_change": 1}],
}


def toml(value: Any) -> str:
    """Plain data as an inline TOML value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps("null" if value is None else value)


@pytest.mark.parametrize("where", ["file", "pyproject.toml"])
def test_forged_policies(where: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"

    def read(forged: Any) -> None:
        lines = (f"{json.dumps(key)} = {toml(value)}" for key, value in forged.items())
        path.write_text("\n".join(lines), "utf-8")
        _ = read_policy(path) if where == "file" else read_policy(folder=tmp_path)

    assert unclear(read, {"tool": {"sinkscope": {"check": POLICY}}} if where != "file" else POLICY) == []


@pytest.mark.parametrize("text", ["check = 7", "check = []", "check = 'x'", "check = [{rules = []}]"])
def test_a_policy_that_is_no_table_is_not_passed_over(text: str, tmp_path: Path) -> None:
    """The built-in policy would judge in its place."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.sinkscope]\n{text}\n")
    with pytest.raises(SinkscopeError, match=r"pyproject.toml.*\[tool.sinkscope.check\].*is no table"):
        read_policy(folder=tmp_path)
    (tmp_path / "pyproject.toml").write_text("tool = 7\n")
    assert read_policy(folder=tmp_path) == DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "{b = " * 5000, "a" + ".a" * 5000 + " = 1"]
)
def test_policies_nested_too_deeply(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SinkscopeError, match=r"pyproject\.toml"):
        read_policy(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("name", ["manifest.json", "summary.json"])
def test_runs_nested_too_deeply(name: str, run_folder: Path) -> None:
    file = run_folder / name
    whole = file.read_text()
    for deep in ("[" * 100_000, "[" * 900 + "]" * 900):
        try:
            file.write_text(whole.rstrip().removesuffix("}") + ', "more": ' + deep + "}")
            with pytest.raises(SinkscopeError):
                load_run(run_folder)
        finally:
            file.write_text(whole)
