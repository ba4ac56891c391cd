"""A result folder holds one whole run: the old one, the new one, or none, at whatever moment its process dies."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dying
import pytest
from conftest import Tell
from tiers import slow_but

from sinkscope import scan
from sinkscope.errors import SinkscopeError
from sinkscope.runs import whole
from sinkscope.runs.folder import UNFINISHED, write_file
from sinkscope.runs.run import FILES, RUN_FOLDER, load_run

fcntl = pytest.importorskip("fcntl", reason="users, modes and kills of POSIX")
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


@pytest.mark.slow
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


def no_links(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("lacking", slow_but(["nothing", "exchange", "links"], "exchange", "links"))
def test_part_of_a_run_keeps_its_shards(
    lacking: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a system that cannot exchange folders, and on one that cannot give a file a second name."""
    out = tmp_path / "there" / "run"
    dying.prepare(out, "-", str(runs / "shards"))
    run = load_run(runs / "new")
    run.shards, run.manifest.complete = out, False
    if lacking == "links":
        monkeypatch.setattr(os, "link", no_links)
    with dying.broken_off(0, lambda: None, lacking == "exchange"):
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


def written_inside(runs: Path, out: Path) -> bool:
    """Saves the run `new` over a copy of `old`; whether the folder stayed the same one. The files must be the new."""
    shutil.copytree(runs / "old", out)
    inode = out.stat().st_ino
    load_run(runs / "new").save(out, force=True)
    assert files(out) == files(runs / "new")
    assert [path.name for path in out.parent.iterdir()] == [out.name], "nothing is left beside it"
    assert sorted(path.name for path in out.iterdir()) == sorted(files(out)), "nor in it"
    return out.stat().st_ino == inode


def refused_by_the_disk(*arguments: Any) -> int:
    """Stands in for renameat2 on a file system that knows no exchange."""
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(renameat2=refused_by_the_disk)])
def test_a_system_without_an_exchange_writes_inside(
    library: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no such call; some Linux file systems refuse it."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *names, **options: library)
    assert written_inside(runs, tmp_path / "run")


def test_an_exchange_that_fails_otherwise_is_one_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk's error is no reason to try the same disk again."""

    def broken(*arguments: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    shutil.copytree(runs / "old", tmp_path / "run")
    monkeypatch.setattr(ctypes, "CDLL", lambda *names, **options: SimpleNamespace(renameat2=broken))
    with pytest.raises(SinkscopeError, match=r"^cannot write .*/run: Input/output error$"):
        load_run(runs / "new").save(tmp_path / "run", force=True)
    assert files(tmp_path / "run") == files(runs / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_deleted_working_folder_replaces_nothing(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell may have stood in the run folder: where it stands cannot be asked any more."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert written_inside(runs, tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives a folder away")
def test_the_folder_of_another_user_stays_hers(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "old", out)
    os.chown(out, 1234, 1234)
    load_run(runs / "new").save(out, force=True)
    assert (out.stat().st_uid, out.stat().st_gid) == (1234, 1234)
    assert files(out) == files(runs / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_name_that_leaves_no_room_for_a_prefix(runs: Path, tmp_path: Path) -> None:
    assert written_inside(runs, tmp_path / ("n" * 250))


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match=r"^cannot read the run folder .*nnn: File name too long$"):
        load_run(tmp_path / ("n" * 300))


@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_a_run_of_another_user_that_may_not_be_read(mode: int, runs: Path) -> None:
    """It is a run folder, so nobody may say that it is none."""
    place = Path(tempfile.mkdtemp())  # pytest's own folder lets nobody else in
    user = os.geteuid()
    try:
        place.chmod(0o755)
        shutil.copytree(runs / "old", place / "run")
        (place / "run").chmod(mode)
        if user == 0:
            os.seteuid(65534)  # the superuser may read everything
        with pytest.raises(SinkscopeError, match=r"^cannot read the run folder .*/run: Permission denied$"):
            load_run(place / "run")
    finally:
        os.seteuid(user)
        (place / "run").chmod(0o700)
        shutil.rmtree(place)


def test_a_temporary_folder_that_another_process_takes_for_a_leftover(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock: that process removes it, so another is made."""
    make, locks = tempfile.mkdtemp, list[int]()

    def taken(**options: Any) -> str:
        folder = make(**options)
        if not locks:
            locks.append(os.open(Path(folder) / whole.LOCK, os.O_RDWR | os.O_CREAT))
            fcntl.flock(locks[0], fcntl.LOCK_EX)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    try:
        assert not written_inside(runs, tmp_path / "run")
    finally:
        os.close(locks[0])


def test_every_temporary_folder_is_taken_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp

    def removed(**options: Any) -> str:
        folder = make(**options)
        Path(folder).rmdir()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", removed)
    with pytest.raises(SinkscopeError, match=r"^cannot write .*table.csv: another process removes each new folder$"):
        write_file(tmp_path / "table.csv", "a")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_beside_a_file_goes(tmp_path: Path) -> None:
    """By the next that writes a file there, whatever its name; what a living process holds stays."""
    left = tmp_path / f"{whole.WORK}left"
    left.mkdir()
    with whole.work_in(tmp_path, whole.WORK) as held:
        write_file(tmp_path / "table.csv", "a")
        assert {path.name for path in tmp_path.iterdir()} == {"table.csv", held.folder.name}
    write_file(tmp_path / "table.csv", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert (tmp_path / "table.csv").read_text() == "b"


def test_a_file_system_without_locks_keeps_leftovers(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There nobody can tell whether a temporary folder's process still lives."""

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = tmp_path / f".run{whole.WORK}left"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    load_run(runs / "new").save(tmp_path / "run")
    assert files(tmp_path / "run") == files(runs / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"run", left.name}


def test_a_full_disk_leaves_no_folders(tmp_path: Path) -> None:
    def full(work: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SinkscopeError, match=r"^cannot write .*/deep/er/run: No space left on device$"):
        RUN_FOLDER.write(tmp_path / "deep" / "er" / "run", False, full)
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(SinkscopeError, match=rf"is damaged: {name} is missing, or no file$"):
        load_run(out)
