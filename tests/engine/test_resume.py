"""A killed scan resumes where it stopped and ends with the same result; shards of another scan are refused."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import TABLES, Scan, Tell, make_model
from forked import Kills
from models import random_ids
from random_share import share_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiers import slow_but
from typer.testing import CliRunner, Result

import sinkscope
from sinkscope.cli import app
from sinkscope.cli.options import slugs
from sinkscope.engine import shards as shards_module
from sinkscope.engine.collector import Part
from sinkscope.engine.shards import Shard, Shards, first_difference
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs import whole
from sinkscope.runs.folder import UNFINISHED as SHARDS
from sinkscope.runs.folder import unfinished_in
from sinkscope.runs.run import Run, load_run

ARGS = ("--data", "prose", "--data", "random", "--num-sequences", "5", "--seq-len", "70", "--batch-size", "2")
BATCHES = 6


class Killed(BaseException):
    """Stands in for kill -9: nothing of ours catches it."""


def same_tables(a: Path, b: Path) -> None:
    for name in (*TABLES, "domains.csv", "summary.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def unbroken(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    _measure(tiny_folder, out).save(out)
    return out


def _measure(model: Path, out: Path, resume: bool = False, **changed: Any) -> Run:
    options = {"data": ["prose", "random"], "num_sequences": 5, "seq_len": 70, "batch_size": 2}
    return sinkscope.scan(str(model), shards=out, resume=resume, **{**options, **changed})


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kill_after(n): the n-th shard is written, then the process dies."""
    write = Shards.write

    def arm(last: int) -> None:
        written = 0

        def dying(self: Shards, *args: Any) -> None:
            nonlocal written
            write(self, *args)
            written += 1
            if written == last:
                raise Killed

        monkeypatch.setattr(Shards, "write", dying)

    yield arm
    monkeypatch.setattr(Shards, "write", write)


BreakOff = Callable[[Path, Path, int], None]


@pytest.fixture
def break_off(kill_after: Any, monkeypatch: pytest.MonkeyPatch) -> BreakOff:
    """break_off(model, out, n): a scan that dies once its n-th shard is written."""

    def scan(model: Path, out: Path, last: int) -> None:
        kill_after(last)
        with pytest.raises(Killed):
            _measure(model, out)
        monkeypatch.undo()

    return scan


@pytest.mark.parametrize("last", slow_but(range(1, BATCHES + 1), 4))
def test_a_scan_killed_after_any_batch_ends_byte_identical(
    last: int, tiny_folder: Path, unbroken: Path, tmp_path: Path, break_off: BreakOff
) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, last)
    assert len(list((out / SHARDS).glob("*.safetensors"))) == last
    run = _measure(tiny_folder, out, resume=True)
    run.save(out)
    same_tables(out, unbroken)
    assert run.manifest.complete
    assert not (out / SHARDS).exists()


@pytest.mark.slow
def test_a_kill_while_a_shard_is_written_loses_that_batch_only(
    tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    save = shards_module.save_file
    calls = []

    def dying(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise Killed
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(shards_module, "save_file", dying)
    with pytest.raises(Killed):
        _measure(tiny_folder, out)
    monkeypatch.undo()
    assert len(list((out / SHARDS).glob("*.safetensors"))) == 2
    _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)


Damage = Callable[[Path, Path], object]


def forged(**facts: Any) -> Damage:
    """Edits the facts of the second shard, as a file in today's format can be written by any program."""

    def edit(first: Path, second: Path) -> None:
        with safe_open(second, framework="pt") as file:
            about = json.loads(file.metadata()["about"]) | facts
            metadata = file.metadata() | {"about": json.dumps(about)}
        save_file(load_file(second), second, metadata=metadata)

    return edit


def flipped(first: Path, second: Path) -> None:
    content = bytearray(second.read_bytes())
    content[-9] ^= 1
    second.write_bytes(content)


def swapped(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


DAMAGE: dict[str, Damage] = {
    "cut": lambda first, second: second.write_bytes(second.read_bytes()[:100]),
    "zeroed end": lambda first, second: second.write_bytes(second.read_bytes()[:-64] + bytes(64)),
    "one bit": flipped,
    "swapped": swapped,
    "renamed": lambda first, second: second.rename(second.with_name("000-00000003.safetensors")),
    "no number": lambda first, second: second.rename(second.with_name("a-b.safetensors")),
    "count": forged(count=5),
    "count 0": forged(count=0),
    "count -1": forged(count=-1),
    "start": forged(start=3),
    "parts": forged(parts=[]),
    "text": lambda first, second: second.write_text("no shard", "utf-8"),
}


@contextmanager
def logged() -> Iterator[list[str]]:
    """What sinkscope logs from INFO on."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("sinkscope")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize("damage", slow_but(DAMAGE, "zeroed end"))
def test_a_damaged_shard_is_measured_again(
    damage: str, tiny_folder: Path, unbroken: Path, tmp_path: Path, break_off: BreakOff
) -> None:
    """What a power cut leaves, a disk's error, and files that someone moved or edited: never another number."""
    out = tmp_path / "run"
    break_off(tiny_folder, out, 3)
    DAMAGE[damage](*sorted((out / SHARDS).glob("*.safetensors"))[:2])
    with logged() as lines:
        _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)
    assert len(lines) == (2 if damage == "swapped" else 1)
    assert "is damaged: its sequences are measured again" in lines[0]


@pytest.mark.slow
def test_a_shard_of_another_scan_is_measured_again(
    tiny_folder: Path, unbroken: Path, tmp_path: Path, break_off: BreakOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    break_off(tiny_folder, out, 1)
    with pytest.raises(KeyboardInterrupt):
        _measure(tiny_folder, other, seed=1, progress=_interrupt_after(2))
    name = "000-00000000.safetensors"
    shutil.copyfile(other / SHARDS / name, out / SHARDS / name)
    _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)


def _interrupt_after(count: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "scanning" and done >= count:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, "\x00"])
def test_a_damaged_key_is_one_line(text: str, tmp_path: Path) -> None:
    Shards.open(tmp_path, {"schema_version": 2}, resume=False)
    (tmp_path / SHARDS / "key.json").write_text(text, "utf-8")
    with pytest.raises(sinkscope.SinkscopeError, match=r"key\.json is damaged: start anew with --force$"):
        Shards.open(tmp_path, {"schema_version": 2}, resume=True)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["key.json", "000-00000000.safetensors"])
@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_the_place_of_a_batch_is_refused(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Nobody writes into it: who reads it waits for ever."""
    key, quantities = {"schema_version": 2}, quantity_set()
    shards = Shards.open(tmp_path, key, resume=False)
    part = Part(2, True, 4, 4, {"heads": torch.zeros(2, 4, len(quantities.metrics.names("heads")))})
    shards.write([Shard(0, 0, 2, 2, None, {"layers.0": [part]})], quantities)
    (tmp_path / SHARDS / name).unlink()
    make(tmp_path / SHARDS / name)
    with pytest.raises(sinkscope.SinkscopeError, match=f"shards/{name} is no file: remove it, or start anew with --f"):
        list(Shards.open(tmp_path, key, resume=True).read(quantities))
    Shards.open(tmp_path, key, resume=False)
    assert [path.name for path in (tmp_path / SHARDS).iterdir()] == ["key.json"]


@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_the_place_of_a_half_written_batch_is_replaced(tmp_path: Path) -> None:
    shards, quantities = Shards.open(tmp_path, {"schema_version": 2}, resume=False), quantity_set()
    os.mkfifo(tmp_path / SHARDS / "000-00000000.tmp")
    part = Part(2, True, 4, 4, {"heads": torch.zeros(2, 4, len(quantities.metrics.names("heads")))})
    shards.write([Shard(0, 0, 2, 2, None, {"layers.0": [part]})], quantities)
    assert len(list(shards.read(quantities))) == 1


@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "heads.csv", "sinks.parquet"])
@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_the_place_of_a_run_s_file_is_one_line(name: str, unbroken: Path, tmp_path: Path) -> None:
    run = shutil.copytree(unbroken, tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(sinkscope.SinkscopeError, match=r"is not a run folder|is damaged"):
        load_run(run)


@pytest.mark.parametrize(("name", "column"), [("heads", "stream"), ("length_curve", "length"), ("layers", "layer")])
def test_a_table_without_what_tells_its_rows_apart_is_one_line(
    name: str, column: str, unbroken: Path, tmp_path: Path
) -> None:
    """Though the manifest says the same of the table: every reader would fail at it."""
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    table = pd.read_csv(folder / f"{name}.csv").drop(columns=column)
    table.to_csv(folder / f"{name}.csv", index=False)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    del manifest["tables"][name]["columns"][column]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {}}), "utf-8")
    with pytest.raises(sinkscope.SinkscopeError, match=rf"is damaged: {name}\.csv has no column {column}$"):
        load_run(folder)


@pytest.mark.parametrize("name", ["summary.json", "heads.csv", "sequences.parquet"])
def test_a_run_without_a_file_says_which(name: str, unbroken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    (folder / name).unlink()
    with pytest.raises(sinkscope.SinkscopeError, match=rf"is damaged: {name} is missing, or no file$"):
        load_run(folder)


def test_a_place_that_cannot_hold_shards_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(sinkscope.SinkscopeError, match=r"^cannot write .*/file/run/shards: Not a directory$"):
        Shards.open(tmp_path / "file" / "run", {"schema_version": 2}, resume=False)


@pytest.mark.slow
def test_a_full_disk_keeps_the_batches_before(
    tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save, written = tmp_path / "run", shards_module.save_file, list[Path]()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, metadata=metadata)

    with monkeypatch.context() as disk:
        disk.setattr(shards_module, "save_file", full)
        told = r"^cannot write .*\.safetensors: No space left on device; --resume continues from there$"
        with pytest.raises(sinkscope.SinkscopeError, match=told):
            _measure(tiny_folder, out)
    assert sorted(path.suffix for path in (out / SHARDS).iterdir()) == [".json", ".safetensors", ".safetensors"]
    _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)


@pytest.mark.parametrize("failing", ["key.tmp", "000-00000000.tmp"])
def test_a_full_disk_before_the_first_batch_leaves_nothing(
    failing: str, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written key stayed, and the next scan there was refused as one beside an unfinished one."""
    sync = whole.sync_file

    def full(path: Path) -> None:
        if path.name == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(whole, "sync_file", full)
    with pytest.raises(sinkscope.SinkscopeError, match=r"No space left on device$"):
        sinkscope.scan(tiny_model, data=random_ids(2, 16), shards=tmp_path / "run", self_check=False)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_that_cannot_be_deleted_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences would be measured again, and then stand there twice."""
    shards = Shards.open(tmp_path, {"schema_version": 2}, resume=False)
    (tmp_path / SHARDS / "000-00000000.safetensors").write_bytes(b"half")

    def kept(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", kept)
    told = r"safetensors is damaged \(Operation not permitted\): start anew with --force$"
    with pytest.raises(sinkscope.SinkscopeError, match=told):
        list(shards.read(quantity_set()))


def test_every_bit_of_a_shard_counts(tmp_path: Path) -> None:
    key, quantities = {"schema_version": 2}, quantity_set()
    name = next(iter(quantities.axes()))
    part = Part(2, True, 4, 4, {name: torch.arange(6.0).reshape(2, 3)})
    shards = Shards.open(tmp_path, key, resume=False)
    shards.write([Shard(0, 0, 2, 2, None, {"m": [part]})], quantities)
    (path,) = (tmp_path / SHARDS).glob("*.safetensors")
    content = path.read_bytes()
    assert len(list(shards.read(quantities))) == 1
    for bit in range(0, 8 * len(content), 37):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert not list(shards.read(quantities)), f"bit {bit} of {8 * len(content)}"
        assert not path.exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    slow_but(
        [
            ({"seq_len": 64}, "seq_len"),
            ({"seed": 1}, "seed"),
            ({"data": ["prose", "code"]}, "data"),
            ({"epsilon": 0.5}, "epsilon"),
            ({"dtype": "bfloat16"}, "dtype"),
            ({"batch_size": 1}, "batch_size"),
            ({"dormant_rule": "awft>0.5"}, "dormant_rule"),
            ({"spectra": 1}, "spectra"),
        ],
        ({"data": ["prose", "code"]}, "data"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"spectra": 1}, "spectra"),
    ),
)
def test_another_scan_is_refused(
    changed: dict[str, Any], named: str, tiny_folder: Path, tmp_path: Path, break_off: BreakOff,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    break_off(tiny_folder, out, 1)
    with pytest.raises(sinkscope.SinkscopeError, match=f"unfinished scan with another {named}"):
        _measure(tiny_folder, out, resume=True, **changed)
    assert (out / SHARDS / "key.json").exists()


def test_another_rule_of_what_is_cheap_is_refused(
    tiny_folder: Path, tmp_path: Path, break_off: BreakOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two versions: the rest would be measured on other sequences."""
    out = tmp_path / "run"
    break_off(tiny_folder, out, 1)
    monkeypatch.setattr("sinkscope.engine.shards.SPECTRA_CUBES", 1)
    with pytest.raises(sinkscope.SinkscopeError, match="unfinished scan with another spectra"):
        _measure(tiny_folder, out, resume=True)


def test_another_model_is_refused(tiny_folder: Path, copied: Path, tmp_path: Path, break_off: BreakOff) -> None:
    out = tmp_path / "run"
    break_off(copied, out, 1)
    weights = load_file(copied / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] * 1.001
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished scan with another model\.weights_sha256"):
        _measure(copied, out, resume=True)


def other_numbers(model: Any) -> Any:
    """The same model with one number of one weight changed."""
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    return model


def of_object(model: Any, out: Path, resume: bool = False) -> Run:
    ids = random_ids(6, 20)
    return sinkscope.scan(model, data=ids, batch_size=2, shards=out, resume=resume, self_check=False)


def killed_scan_of(model: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Shards.write

    def dying(self: Shards, *args: Any) -> None:
        write(self, *args)
        raise Killed

    with monkeypatch.context() as killing, pytest.raises(Killed):
        killing.setattr(Shards, "write", dying)
        of_object(model, out)


def test_another_model_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no files, and its name and sizes are the same: only its numbers tell."""
    out = tmp_path / "run"
    killed_scan_of(make_model(), out, monkeypatch)
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished scan with another model\.tensors_sha256"):
        of_object(other_numbers(make_model()), out, resume=True)
    run = of_object(make_model(), out, resume=True)
    run.save(out)
    pd.testing.assert_frame_equal(run.heads, of_object(make_model(), tmp_path / "whole").heads, check_exact=True)
    pd.testing.assert_frame_equal(of_object(make_model(), out, resume=True).heads, load_run(out).heads)
    with pytest.raises(sinkscope.SinkscopeError, match=r"finished run with another model\.tensors_sha256"):
        of_object(other_numbers(make_model()), out, resume=True)


def test_a_model_object_that_cannot_be_hashed_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured, and kept, but no other scan goes on with what may be another model's."""
    out = tmp_path / "run"
    monkeypatch.setattr("sinkscope.checkpoints.checkpoint.tensors_sha256", lambda model: None)
    killed_scan_of(make_model(), out, monkeypatch)
    with pytest.raises(sinkscope.SinkscopeError, match="an unfinished scan, and nothing tells whether it is of this"):
        of_object(make_model(), out, resume=True)
    of_object(make_model(), out).save(out)
    with pytest.raises(sinkscope.SinkscopeError, match="a finished run, and nothing tells whether it is of this model"):
        of_object(make_model(), out, resume=True)


def test_another_configuration_is_refused(tiny_folder: Path, copied: Path, tmp_path: Path, break_off: BreakOff) -> None:
    """The weights are the same, the numbers are not: config.json says how the weights are used."""
    out = tmp_path / "run"
    break_off(copied, out, 1)
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), "utf-8")
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished scan with another model\.config_sha256"):
        _measure(copied, out, resume=True)


@pytest.mark.parametrize(
    "name",
    slow_but(["generation_config.json", "preprocessor_config.json", "chat_template.jinja"], "chat_template.jinja"),
)
def test_another_settings_file_is_refused(name: str, copied: Path, tmp_path: Path, break_off: BreakOff) -> None:
    """How pictures are scaled, what a decoder starts with, the words around a prompt."""
    out = tmp_path / "run"
    break_off(copied, out, 1)
    with (copied / name).open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(sinkscope.SinkscopeError, match=f"unfinished scan with another settings.{name}"):
        _measure(copied, out, resume=True)


def test_other_code_is_refused(
    tiny_folder: Path, tmp_path: Path, break_off: BreakOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, 1)
    monkeypatch.setattr("sinkscope.engine.shards.MEASURING", ("capture", "metrics"))
    told = r"unfinished scan with another measuring_code \([0-9a-f]{16} there, [0-9a-f]{16} now\)"
    with pytest.raises(sinkscope.SinkscopeError, match=told):
        _measure(tiny_folder, out, resume=True)


@pytest.mark.slow
def test_the_command_tells_how_to_go_on(scan_cli: Scan, tiny_folder: Path, tmp_path: Path, break_off: BreakOff) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, 2)
    refused = scan_cli(tiny_folder, *ARGS, out=out)
    assert refused.code == 2
    assert "--resume goes on with it, --force starts anew" in refused.stderr
    assert scan_cli(tiny_folder, *ARGS, "--resume", out=out).code == 0
    again = scan_cli(tiny_folder, *ARGS, "--resume", out=out)
    assert again.code == 0, "a loop that goes on until the scan is done must end"
    assert again.stderr == f"sinkscope: {tiny_folder}: already finished, in {out}\n"
    assert again.stdout.startswith(f"{tiny_folder.name}  LlamaModel")
    assert scan_cli(tiny_folder, *ARGS, "--force", out=out).code == 0


@pytest.mark.slow
def test_interrupted_scans_go_on(
    scan_cli: Scan, tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, written = tmp_path / "run", Shards.write, []

    def interrupting(self: Shards, *args: Any) -> None:
        write(self, *args)
        written.append(args)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Shards, "write", interrupting)
    stopped = scan_cli(tiny_folder, *ARGS, out=out)
    monkeypatch.undo()
    assert stopped.code == 130
    assert "--resume goes on" in stopped.stderr
    assert not load_run(out).manifest.complete
    assert scan_cli(tiny_folder, *ARGS, "--resume", out=out).code == 0
    same_tables(out, unbroken)


@pytest.mark.parametrize(
    "step",
    slow_but(["sinkscope.engine.scan.build_run", "sinkscope.runs.run.Run.save"], "sinkscope.runs.run.Run.save"),
)
def test_ctrl_c_after_the_last_batch_says_what_is_kept(
    step: str, scan_cli: Scan, tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is measured, and the tables are not written yet: the line said no more than "interrupted"."""
    out = tmp_path / "run"

    def interrupting(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, interrupting)
        stopped = scan_cli(tiny_folder, *ARGS, out=out)
    assert stopped.code == 130
    assert stopped.stderr.endswith(f"sinkscope: interrupted: what is measured is kept in {out}; --resume goes on\n")
    assert scan_cli(tiny_folder, *ARGS, "--resume", out=out).code == 0
    same_tables(out, unbroken)


@pytest.mark.slow
def test_batches_halved_by_memory_stay_halved(
    tiny_folder: Path, tmp_path: Path, kill_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinkscope.engine.loop import Loop

    one_batch = Loop._one_batch

    def scarce(self: Loop, domain: int, batch: Any) -> Any:
        if len(batch) > 1:
            raise MemoryError
        return one_batch(self, domain, batch)

    monkeypatch.setattr(Loop, "_one_batch", scarce)
    whole = _measure(tiny_folder, tmp_path / "whole")
    whole.save(tmp_path / "whole")
    kill_after(3)
    with pytest.raises(Killed):
        _measure(tiny_folder, tmp_path / "run")
    monkeypatch.undo()
    again = _measure(tiny_folder, tmp_path / "run", resume=True)
    again.save(tmp_path / "run")
    assert again.manifest.batch_size == whole.manifest.batch_size == 1
    same_tables(tmp_path / "run", tmp_path / "whole")


def test_a_failed_first_batch_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinkscope.engine.loop import Loop

    def failing(self: Loop, *args: Any) -> Any:
        raise sinkscope.SinkscopeError("a layer overflowed")

    monkeypatch.setattr(Loop, "_one_batch", failing)
    with pytest.raises(sinkscope.SinkscopeError, match="overflowed"):
        _measure(tiny_folder, tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_several_models_each_have_their_folder(scan_cli: Scan, tiny_folder: Path, tmp_path: Path) -> None:
    names = tmp_path / "models.txt"
    names.write_text(
        f"# two that work, one that does not\n{tiny_folder}\nexample:trigger-softmax\n\n{tmp_path}/absent\n"
    )
    words = ["scan", "--models", str(names), "--num-sequences", "2", "--out", str(tmp_path / "runs"), "--quiet"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "1 of 3 models failed" in result.stderr
    told = result.stderr.splitlines()[0]
    assert told.count("absent") == 1, "the model is named once"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {tiny_folder.name, "example-trigger-softmax"}
    again = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert again.exit_code == 2
    assert again.stderr.count("already finished") == 2


@pytest.mark.slow
def test_another_seed_is_named_though_the_data_were_left_to_the_default(tiny_folder: Path, tmp_path: Path) -> None:
    """No --data and `--data prose` ask for the same text; the seed alone decides which documents are read."""
    words = (tiny_folder, "--out", tmp_path / "run")
    assert scan_several(*words).exit_code == 0
    again = scan_several(*words, "--data", "prose", "--seed", 1, "--resume")
    assert again.exit_code == 2
    assert "holds a finished run with another seed (0 there, 1 now)" in again.stderr


def test_long_values_that_differ_are_told_apart() -> None:
    folder = "a-long-name-of-a-folder/" * 3
    told = first_difference({"data": [f"{folder}b.jsonl"]}, {"data": [f"{folder}a.jsonl"]}, ["data"])
    assert told == "data (['a-long-name-of-a...a-folder/a.jsonl'] there, ['a-long-name-of-a...a-folder/b.jsonl'] now)"


def test_a_setting_that_was_left_out_is_called_the_default() -> None:
    assert first_difference({"seq_len": 32}, {"seq_len": None}, ["seq_len"]) == "seq_len (the default there, 32 now)"


def scan_several(*words: object) -> Result:
    few = ("--seq-len", "16", "--num-sequences", "2", "--no-self-check")
    return CliRunner().invoke(app, ["scan", *map(str, words), *few])


@pytest.mark.slow
def test_a_finished_run_is_kept_for_the_scan_that_made_it_only(tiny_folder: Path, copied: Path, tmp_path: Path) -> None:
    """Other text, other settings, another model: each is refused by name, with one model and with several."""
    words = (tiny_folder, copied, "--out", tmp_path / "runs", "--data", "random")
    assert scan_several(*words).exit_code == 0
    kept = (tmp_path / "runs" / "copied" / "manifest.json").read_bytes()
    assert scan_several(*words, "--resume", "--quiet").exit_code == 0
    other = scan_several(*words[:-1], "repeated", "--resume")
    assert other.exit_code == 2
    assert other.stderr.count("holds a finished run with another data (['random'] there, ['repeated'] now)") == 2
    one = (copied, "--out", tmp_path / "runs" / "copied", "--data", "random", "--resume")
    assert "another epsilon (0.3 there, 0.5 now)" in scan_several(*one, "--epsilon", 0.5).stderr
    assert "another seed (0 there, 1 now)" in scan_several(*one, "--seed", 1).stderr
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), "utf-8")
    several = scan_several(*words, "--resume")
    assert several.exit_code == 2
    assert "finished run with another model.config_sha256" in several.stderr
    assert "1 of 2 models failed" in several.stderr
    assert (tmp_path / "runs" / "copied" / "manifest.json").read_bytes() == kept


def test_models_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    """Checkpoints are called final, or checkpoint-1000, whatever was trained."""
    names = [str(tmp_path / parent / name) for parent in "ab" for name in ("final", "start")]
    for name in [*names, str(tmp_path / "only")]:
        Path(name).mkdir(parents=True)
    assert list(slugs(names[::2]).values()) == ["a--final", "b--final"]
    assert list(slugs([*names, str(tmp_path / "only")]).values())[-1] == "only"
    refused = scan_several(names[0], tmp_path / "b" / ".." / "a" / "final", "--out", tmp_path / "runs")
    assert refused.exit_code == 2
    assert "would both be written to the folder" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_no_model_and_no_list_is_one_line(tmp_path: Path) -> None:
    for words, told in ((["scan"], "no model"), (["scan", "--models", str(tmp_path / "none")], "cannot read")):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def kills() -> Iterator[Kills]:
    started = Kills()
    yield started
    started.end()


def run_files(folder: Path) -> dict[str, bytes]:
    """The files of a run whose bytes do not tell when and how often it was scanned."""
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.name in (*TABLES, "domains.csv")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(share_of(4)))
@pytest.mark.parametrize("over", ["nothing", "a finished run"])
def test_25_kills_at_random_moments_leave_one_whole_run(
    over: str, seed: int, tiny_folder: Path, unbroken: Path, tmp_path: Path, kills: Kills, tell: Tell
) -> None:
    """200 in all, unless a share is asked for.

    Over a finished run the scan begins with --force, and that run stays until the new one stands.
    """
    draw, out, old = random.Random(seed), tmp_path / "out" / "run", tmp_path / "old"
    words = ("scan", tiny_folder, *ARGS, "--quiet", "--out")
    assert kills.run(*words, old, "--seed", 1)[0] == 0
    whole = kills.run(*words, tmp_path / "timed")[1]
    before, after = run_files(old) if over != "nothing" else {}, run_files(unbroken)
    seen, killed, begun = Counter[str](), 0, False
    while killed < 25:
        if not begun:
            shutil.rmtree(out.parent, ignore_errors=True)
            if before:
                shutil.copytree(old, out)
        option = ("--resume",) if begun and unfinished_in(out) else ("--force",) if before else ()
        code, _ = kills.run(*words, out, *option, after=whole * draw.uniform(0.3, 1.1))
        assert code in (0, -signal.SIGKILL), f"seed {seed}, after {killed} kills: exit {code}"
        killed += code != 0
        found = run_files(out)
        assert found in (before, after, {}), f"seed {seed}, after {killed} kills"
        seen["new" if found == after else "old" if found else "none"] += 1
        begun = found != after
        if found:
            load_run(out)
    assert kills.run(*words, out, "--resume" if unfinished_in(out) else "--force")[0] == 0
    same_tables(out, unbroken)
    assert [path.name for path in out.parent.iterdir()] == ["run"]
    assert not any(path.name.startswith(".") for path in out.iterdir())
    tell(f"seed {seed}, over {over}: {killed} kills, {dict(seen)}")
