"""A result folder holds one whole run: the old one, the new one, or none, at whatever moment its process dies."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import dying
import pytest
from conftest import Tell
from tiers import slow_but

from sinkscope import scan
from sinkscope.errors import SinkscopeError
from sinkscope.runs import whole
from sinkscope.runs.folder import UNFINISHED
from sinkscope.runs.run import FILES, RUN_FOLDER, load_run

DYING = Path(dying.__file__)
Files = dict[str, bytes]


def files(folder: Path) -> Files:
    """The files of a run, without shards and what is hidden."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES} if folder.exists() else {}


@pytest.fixture(scope="module")
def runs(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `old` and `new`, whose files differ, by name too; and `shards`, three files."""
    folder = tmp_path_factory.mktemp("runs")
    ids = [[3, 4, 5, 6], [6, 5, 4, 3]]
    scan(tiny_model, data=ids, self_check=False).save(folder / "old", formats=("csv", "parquet"))
    scan(tiny_model, data=ids[:1], self_check=False).save(folder / "new")
    (folder / UNFINISHED).mkdir()
    for name in ("key.json", "000-00000000.safetensors", "000-00000001.safetensors"):
        (folder / UNFINISHED / name).write_text(name, "utf-8")
    return folder


def one_whole_run(out: Path, old: Files, new: Files, settled: bool = False) -> str:
    """The contract. Returns which run `out` holds: old, new or none.

    `settled`: the system cannot exchange folders. Then the contract holds for every command of sinkscope's, since each
    first finishes the moves that a killed process began.
    """
    if settled:
        RUN_FOLDER.settle(out)
    found = files(out)
    assert found in (old, new, {}), sorted(found)
    return "new" if found == new else "old" if found else "none"


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["exchange", "plain"])
@pytest.mark.parametrize("shards", ["-", "shards"])
@pytest.mark.parametrize("old", ["-", "old"])
def test_a_kill_at_every_step_of_a_save(
    old: str, shards: str, plain: str, runs: Path, tmp_path: Path, tell: Tell
) -> None:
    given = [str(runs / name) if name != "-" else name for name in ("new", old, shards)]
    words = [sys.executable, str(DYING), *given, plain, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{DYING.parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    steps = done.stdout.split()
    states = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(states) == len(steps) + 1, done.stderr
    before, after = files(runs / "old") if old != "-" else {}, files(runs / "new")
    held = []
    for state in states:
        out = state / "run"
        held.append(one_whole_run(out, before, after, settled=plain == "plain"))
        if held[-1] != "new" and shards != "-":
            assert len(list((out / UNFINISHED).iterdir())) == 3, "--resume needs them until the new run stands"
        dying.save(runs / "new", out)
        assert files(out) == after
        assert sorted(path.name for path in out.iterdir()) == sorted(after), "no shards, nothing hidden"
        assert [path.name for path in state.iterdir()] == ["run"], "the next save removes what a killed one left"
    assert held == sorted(held, key=("none", "old", "new").index)
    assert held[-1] == "new"
    seen = ", ".join(f"{held.count(name)} {name}" for name in dict.fromkeys(held))
    tell(f"kills at every step of a save ({old}, {shards}, {plain}): {len(steps)} steps, {seen}")


@pytest.mark.parametrize("plain", slow_but([False, True], False))
def test_an_interrupt_at_every_step_of_a_save(plain: bool, runs: Path, tmp_path: Path) -> None:
    """Ctrl-C: no next command is needed for the folder to hold one run, with or without an exchange."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    before, after = files(runs / "old"), files(runs / "new")
    held, last, ended = [], 0, False
    while not ended:
        last += 1
        out = tmp_path / str(last) / "run"
        dying.prepare(out, str(runs / "old"), str(runs / "shards"))
        try:
            with dying.broken_off(last, interrupt, plain):
                dying.save(runs / "new", out)
            ended = True
        except KeyboardInterrupt:
            pass
        held.append(one_whole_run(out, before, after))
    assert {"old", "new"} == set(held)
    assert last > 20


@pytest.mark.parametrize("plain", [False, True])
def test_part_of_a_run_keeps_its_shards(plain: bool, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / "run"
    dying.prepare(out, "-", str(runs / "shards"))
    run = load_run(runs / "new")
    run.shards, run.manifest.complete = out, False
    with dying.broken_off(0, lambda: None, plain):
        run.save(out)
    assert not load_run(out).manifest.complete
    assert {path.name: path.read_text("utf-8") for path in (out / UNFINISHED).iterdir()} == {
        path.name: path.name for path in (runs / UNFINISHED).iterdir()
    }


def test_a_folder_that_cannot_be_exchanged_is_written_inside(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, or the folder that a shell stands in: it stays the same folder, with its mode."""
    out = tmp_path / "run"
    shutil.copytree(runs / "old", out)
    out.chmod(0o750)
    monkeypatch.chdir(out)
    inode = out.stat().st_ino
    load_run(runs / "new").save(out, force=True)
    assert files(Path()) == files(runs / "new")
    assert out.stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.chdir(tmp_path)
    load_run(runs / "old").save(out, force=True, formats=("csv", "parquet"))
    assert out.stat().st_ino != inode
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    assert files(out)["heads.csv"] == files(runs / "old")["heads.csv"]


def test_the_folder_of_a_new_run_follows_the_umask(runs: Path, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        load_run(runs / "new").save(tmp_path / "run")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750


def test_a_link_to_a_run_stays(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "old", tmp_path / "disk" / "there")
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "there")
    load_run(runs / "new").save(tmp_path / "run", force=True)
    assert (tmp_path / "run").is_symlink()
    assert files(tmp_path / "disk" / "there") == files(runs / "new")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["there"]


def test_the_work_of_a_living_process_is_left_alone(runs: Path, tmp_path: Path) -> None:
    with whole.work_in(tmp_path, f".run{whole.WORK}") as work:
        (tmp_path / f".run{whole.WORK}dead" / "run").mkdir(parents=True)
        load_run(runs / "new").save(tmp_path / "run")
        assert work.run.is_dir()
        assert {path.name for path in tmp_path.iterdir()} == {"run", work.folder.name}


def test_a_damaged_journal_is_one_line(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "old", out)
    (out / whole.COMMITTED).mkdir()
    for text in ("{", "[]", "{}"):
        (out / whole.COMMITTED / whole.JOURNAL).write_text(text, "utf-8")
        with pytest.raises(SinkscopeError, match=r"journal\.json in it is damaged"):
            load_run(out)
    assert files(out) == files(runs / "old")


def changed(content: bytes) -> bytes:
    """One bit of the last digit or byte."""
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


READ = ("heads.csv", "layers.csv", "length_curve.csv", "positions.parquet", "sequences.parquet", "summary.json")


@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_not_the_runs_is_named(name: str, runs: Path, tmp_path: Path) -> None:
    """One bit, another run's file, no file."""
    out = tmp_path / "run"
    shutil.copytree(runs / "old", out)
    other = (runs / "new" / name).read_bytes()
    for content in (changed((out / name).read_bytes()), other):
        (out / name).write_bytes(content)
        with pytest.raises(SinkscopeError, match=rf"run .* is damaged: {name} does not belong to this run"):
            load_run(out)
    (out / name).unlink()
    with pytest.raises(SinkscopeError, match=rf"is damaged: .*No such file.*{name}"):
        load_run(out)
